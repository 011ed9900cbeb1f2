"""What the console is given when an ingress is built."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]+(?=@)|(?<=[?&]password=)[^&#\s]+")  # of a URL; passwords may hold an @


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    enabled: bool = True
    """Whether the ingress serves it."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """The application's configuration with all defaults; for people, and without its secrets."""


def without_credentials(value: Any) -> Any:
    """Return JSON without names and passwords in its URLs."""
    if isinstance(value, dict):
        return {key: without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_credentials(inner) for inner in value]
    return CREDENTIALS.sub("***", value) if isinstance(value, str) else value
