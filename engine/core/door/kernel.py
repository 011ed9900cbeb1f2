"""A scheduler as its parts see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.door.outputs import Outputs
from engine.errors import ServingError

if TYPE_CHECKING:
    from engine.core.kv_cache_manager import KVCacheManager
    from engine.core.request_queue import RequestQueue


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the model that limit which requests it can serve."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    chunked_prefill: bool = True
    """Whether a prompt can be computed in several steps."""
    pools_all_tokens: bool = False
    """Whether pooling needs the hidden states of all prompt tokens."""


class Kernel(Protocol):
    """What parts know of the scheduler that they serve."""

    out: Outputs
    kv_cache: KVCacheManager
    limits: ModelLimits
    queue: RequestQueue

    def abort(self, request_id: str, now: float, error: ServingError | None = None) -> None:
        """End a request, as Aborted does."""
