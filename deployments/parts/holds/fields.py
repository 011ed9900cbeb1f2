"""Fields by which clients ask that their prompts stay cached."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deployments.http.bodies import PartFields
from deployments.http.body import Number
from deployments.openai.cache_marks import CacheControl, Control
from deployments.openai.chat_body import ChatBody
from deployments.openai.sampling_body import SamplingBody
from deployments.parts.holds.cache_marks import SECONDS, CacheMark, check_marks


class PromptCacheOptions(Control):
    """OpenAI's options of all marks of a request."""

    mode: Literal["implicit", "explicit"] = "implicit"
    """`implicit` also marks the end of the last message."""
    ttl: Literal["30m"] = "30m"


class HoldFields(PartFields):
    kinds = (SamplingBody,)

    prompt_cache_key: str = Field(default="", max_length=1024)
    """Name by which holds of this request can be released, if there is no session id."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """`24h` asks for a hold of the prompt; `in_memory` asks for nothing."""
    prompt_cache_options: PromptCacheOptions | None = None
    """Asks for a hold of the prompt for `ttl`; with the mode `explicit` only up to each marked part."""
    hold_s: Number | None = Field(default=None, gt=0)
    """Asks that the prompt stays cached for so many seconds after its last use."""

    @property
    def hold_ttl_s(self) -> float | None:
        """Seconds for which the whole prompt is to stay cached; None if the request does not ask for that."""
        if self.hold_s is not None:
            return self.hold_s
        options = self.prompt_cache_options
        if options is not None and options.mode == "implicit":
            return SECONDS[options.ttl]
        return SECONDS["24h"] if self.prompt_cache_retention == "24h" else None


class ChatHoldFields(PartFields):
    kinds = (ChatBody,)

    cache_control: CacheControl | None = None
    """Asks that the prompt stays cached up to the end of the last message."""

    def check(self) -> None:
        super().check()
        assert isinstance(self, ChatBody)
        check_marks(marks_of(self), "cache_control")


def marks_of(body: ChatBody) -> list[CacheMark]:
    """Return the marks of a request, in the order of the prompt: on tools, on parts, and on the whole request."""
    assert isinstance(body, HoldFields) and isinstance(body, ChatHoldFields)
    options, tools = body.prompt_cache_options, body.offered_tools
    marks = [CacheMark(SECONDS[tool.cache_control.ttl], part=i) for i, tool in enumerate(tools) if tool.cache_control]
    for i, message in enumerate(body.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if (control := part.cache_control) is not None:
                marks.append(CacheMark(SECONDS[control.ttl], i, j))
            elif (point := part.prompt_cache_breakpoint) is not None:
                marks.append(CacheMark(SECONDS[point.ttl or (options.ttl if options else "30m")], i, j))
    ttl_s = SECONDS[body.cache_control.ttl] if body.cache_control is not None else body.hold_ttl_s
    if ttl_s is not None:
        last = body.messages[-1].content
        marks.append(CacheMark(ttl_s, len(body.messages) - 1, len(last) - 1 if isinstance(last, list) else 0))
    return marks
