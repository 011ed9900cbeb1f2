"""What the policy sees: one replica, and all replicas of a pool together. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What a step costs in an engine, fitted there (engine/core/step_cost.py); 0 where not known yet.

    A step of n decoding sequences takes decode_step_s + n * decode_sequence_s. token_s: of each prompt token, all told.
    """

    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica now; its rates are over the last few seconds.

    running: sequences that hold KV. waiting: in the engine's queue, or with their prompt in another engine.
    queued_tokens: prompt tokens that are still to be computed here.
    prefill_tokens_per_s: prompt tokens computed here. cached_tokens_per_s: those that the prefix cache spared.
    prefills_per_s: prompts that were computed to their end here.
    spilled_fraction: of them, those that a prefill pool would have computed, had it had room.
    output_tokens_per_s: generated. itl_s: mean time between two tokens of a sequence; 0 without any.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    cached_tokens_per_s: float = 0.0
    prefills_per_s: float = 0.0
    spilled_fraction: float = 0.0
    output_tokens_per_s: float = 0.0
    itl_s: float = 0.0
    blocks_used: int = 0
    blocks_total: int = 1
    costs: EngineCosts = EngineCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """All replicas of a pool.

    running_replicas: that are up, also where one has not reported yet. replicas: those that have.
    waiting, waiting_tokens: sequences that wait in front of the pool, in ingresses, and tokens of their prompts.
    """

    running_replicas: int
    replicas: Sequence[ReplicaLoad]
    waiting: int = 0
    waiting_tokens: int = 0

    @property
    def sequences(self) -> int:
        """Those that run, and those that would if there was room."""
        return self.waiting + sum(r.running + r.waiting for r in self.replicas)

    @property
    def queued_tokens(self) -> int:
        return self.waiting_tokens + sum(r.queued_tokens for r in self.replicas)

    @property
    def busy(self) -> bool:
        return self.sequences > 0 or self.queued_tokens > 0 or any(r.prefills_per_s for r in self.replicas)
