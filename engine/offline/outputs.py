"""What the offline API returns; names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.wire.messages import RequestTimes, TokenLogprob


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    logprobs: one per token, if asked for. stop_reason: the stop string or stop token id that ended it.
    error: why it failed, when finish_reason is "error"; the text is what came before.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its `n` sequences.

    prompt: the text, or None if token ids were given.
    prompt_logprobs: one per prompt token, the first None, if asked for.
    num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)
