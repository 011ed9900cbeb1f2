"""An image as a request specifies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestedImage:
    field: str
    """Its path for errors, such as `messages[0].content[1].image_url`."""
    url: str
    low_detail: bool
    """Whether it may be downscaled to take fewer tokens."""
