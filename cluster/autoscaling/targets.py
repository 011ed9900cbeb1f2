"""What the policy aims at. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """ttft_ms: to the first token of an answer, from when the engines could have it. itl_ms: from token to token."""

    ttft_ms: float = 2000.0
    itl_ms: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one pool.

    max_num_seqs: sequences that one replica runs at once.
    upscale_delay_s, downscale_delay_s: for so long more, or fewer, replicas must have been wanted all the time.
    scale_to_zero_delay_s: without any work; only where min_replicas is 0.
    """

    min_replicas: int
    max_replicas: int
    max_num_seqs: int
    upscale_delay_s: float
    downscale_delay_s: float
    scale_to_zero_delay_s: float
