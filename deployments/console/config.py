"""The console's settings, given when an ingress is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    enabled: bool = True
    """True for an ingress that serves it."""
    texts: bool = False
    """True for timelines of requests that show prompts and outputs."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """The application's configuration with all defaults; for people, and without its secrets."""
