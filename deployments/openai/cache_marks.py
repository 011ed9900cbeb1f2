"""Fields by which clients ask that a part of their prompt stays cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine.errors import InvalidParameter

MAX_MARKS = 4
SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}


class Control(BaseModel):
    """A JSON object. Fields other than these are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)


class CacheControl(Control):
    """Anthropic's mark: the prompt up to the end of the marked part stays cached for this time after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class CacheBreakpoint(Control):
    """OpenAI's mark."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None
    """The default is that of `prompt_cache_options`."""


class PromptCacheOptions(Control):
    """OpenAI's options of all marks of a request."""

    mode: Literal["implicit", "explicit"] = "implicit"
    """`implicit` also marks the end of the last message."""
    ttl: Literal["30m"] = "30m"


@dataclass(frozen=True, slots=True)
class CacheMark:
    """Asks that a prompt stays cached up to a part of a message, or up to a tool."""

    ttl_s: float
    message: int = -1
    """Index of the message; -1 for a tool."""
    part: int = 0
    """Index of the part, or of the tool."""


def check_marks(marks: Sequence[CacheMark], field: str) -> None:
    if len(marks) > MAX_MARKS:
        raise InvalidParameter(field, len(marks), f"at most {MAX_MARKS} in a request")
