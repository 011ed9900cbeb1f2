"""Settings of the console, given when an ingress is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    enabled: bool = True
    """Whether ingresses serve the console."""
    texts: bool = False
    """Whether timelines show prompts and outputs."""
    currency: str = "USD"
    """Currency of costs."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """The application's configuration with all defaults and without secrets, for display."""
