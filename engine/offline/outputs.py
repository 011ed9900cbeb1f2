"""Results of the offline API, named as in vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import numpy as np

from engine.offline.lora_request import LoRARequest
from engine.wire.parts.images import MultiModalFeatureSpec
from engine.wire.token_delta import RequestTimes, TokenLogprob

Output = TypeVar("Output")


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at its position."""

    logprob: float
    rank: int | None = None  #: 1 for the most likely token
    decoded_token: str | None = None


def by_token(entry: TokenLogprob, text: Callable[[int], str]) -> dict[int, Logprob]:
    """Return the token of a position, and then the most likely ones, by their ids. text: the text of a token."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token, logprob) in enumerate(entry.top, 1):
        found.setdefault(token, Logprob(logprob, rank, text(token)))
    return found


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  #: one per token, if requested, by token id
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    stop_reason: str | int | None = None  #: the stop string or stop token id that ended the sequence
    error: str | None = None  #: reason of the failure if finish_reason is "error"; `text` is the output before it
    times: RequestTimes | None = None
    num_preemptions: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its `n` sequences."""

    request_id: str
    prompt: str | None  #: None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  #: one per prompt token, first None
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
class ClassificationOutput:
    """The probabilities of one prompt's classes, or other numbers for them if `use_activation` says so."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of one prompt."""

    data: np.ndarray  #: float32, [size], or [tokens, size] for a task of tokens


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


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """One prompt and the probabilities of its classes."""

    __slots__ = ()


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """One query with one document, and their score."""

    __slots__ = ()
