"""Results of the offline API, named as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from engine.wire.lora import LoRARequest
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.token_delta import RequestTimes, TokenLogprob

Output = TypeVar("Output")


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  #: one per token, if requested
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: str | int | None = None  #: the stop string or stop token id that ended the sequence
    error: str | None = None  #: reason of the failure if finish_reason is "error"; `text` is the output before it
    times: RequestTimes | None = None
    num_preemptions: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its `n` sequences."""

    request_id: str
    prompt: str | None  #: None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None  #: one per prompt token, the first None, if requested
    num_cached_tokens: int = 0  #: prompt tokens that came from the prefix cache
    mm_features: list[MultiModalFeatureSpec] = field(default_factory=list)  #: images of the prompt
    lora_request: LoRARequest | None = None  #: with the digest of the adapter's files
    cache_salt: str = ""  #: prompts with other salts share no cached prefixes with it
    detokenize: bool = True  #: whether its outputs have a text
    priority: int = 0  #: smaller ones run first, with `scheduling_policy="priority"`

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    """The score of one document."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """One prompt, or one query with one document, and its result."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Output
    num_cached_tokens: int = 0  #: prompt tokens that came from the prefix cache


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """One prompt and its embedding."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """One query with one document, and their score."""

    __slots__ = ()
