"""An image as a request names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestedImage:
    field: str
    """Name of it in errors: `messages[0].content[1].image_url`."""
    url: str
    low_detail: bool
    """It may be made smaller, for fewer tokens."""
