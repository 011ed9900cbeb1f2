"""A scheduler as its parts see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.core.door.outputs import Outputs
from engine.errors import ServingError

if TYPE_CHECKING:
    from engine.core.kv_cache_manager import KVCacheManager
    from engine.core.request import Request
    from engine.core.request_queue import RequestQueue
    from engine.core.stats import SchedulerStats
    from engine.wire.token_delta import FinishReason, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the model that limit which requests it can serve."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    chunked_prefill: bool = True
    """Whether a prompt can be computed in several steps."""
    longest_span: int = 0
    """Tokens of an image that must be in one step; 0 if an image can be in several."""


class Kernel(Protocol):
    """What parts know of the scheduler that they serve."""

    out: Outputs
    kv_cache: KVCacheManager
    limits: ModelLimits
    queue: RequestQueue
    totals: SchedulerStats

    def check_prompt(self, request: Request, asked: Any) -> None:
        """Raise RequestError if a request that generates could never be computed here. asked: what it was made from."""

    def enqueue(self, request: Request, asked: Any) -> Request:
        """Queue a request that has been checked. Returns it, or raises Overloaded and changes nothing. asked: what it
        was made from."""

    def arrived(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Record that the KV of all known tokens of a queued request has come from elsewhere, and its next token."""

    def finish(
        self, request: Request, reason: FinishReason, now: float, delta: TokenDelta | None = None,
        *, error: ServingError | None = None,
    ) -> None:  # fmt: skip
        """End a request. delta: its newest tokens."""

    def abort(self, request_id: str, now: float, error: ServingError | None = None) -> None:
        """End a request, as Aborted does."""
