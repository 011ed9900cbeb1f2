"""Marks on tools and parts of messages: the prompt is to stay cached up to there."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


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
