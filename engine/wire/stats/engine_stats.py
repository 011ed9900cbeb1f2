"""Statistics of an engine, in each EngineStatus."""

from __future__ import annotations

import msgspec

from engine.wire.part_record import R, Records, record_in
from engine.wire.stats.histogram import Histogram


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of one engine, by which routers and control actors choose. All fields are 0 if nothing is known about the
    engine."""

    sequences: int = 0
    """Sequences that are running, waiting, or waiting for KV; each needs one of `slots` to run."""
    queued_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    blocks_used: int = 0
    slots: int = 0
    blocks_total: int = 0
    queued_embeds: int = 0
    """Image embeddings that the vision encoder still has to compute."""
    adapters: tuple[str, ...] = ()
    """Digests of the LoRA adapters in slots."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of one engine, and totals since its start.

    Blocks: total = free + cached + used, and used = held by running requests + reserved + leased.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    block_size: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    finished: dict[str, int]
    """Requests that ended, by finish reason."""
    group_blocks: dict[str, dict[str, int]] = {}
    """Numbers of `used`, `cached` and `free` blocks by KV cache group number, and of snapshots of recurrent states
    under `states`; empty with a single group and no states. The fields above are those of the first group."""
    group_block_bytes: dict[str, int] = {}
    """Bytes on one rank of one block of each group in `group_blocks`, and of one snapshot."""
    blocks_reserved: int = 0
    """Blocks held only by requests with KV from another engine, either still coming or waiting for a slot."""
    blocks_leased: int = 0
    """Blocks held only by computed prompts that another engine may still read."""
    receiving: int = 0
    """Requests whose KV is coming from another engine."""
    leased: int = 0
    """Computed prompts whose blocks another engine may still read."""
    queued_tokens: int = 0
    """Prompt tokens still to be computed."""
    seconds_per_step: float = 0.0
    """Fixed cost of a step, fitted while the engine runs; 0 while unknown."""
    seconds_per_token: float = 0.0
    decode_seconds_per_step: float = 0.0
    """Fixed cost of a step that only decodes."""
    decode_seconds_per_sequence: float = 0.0
    prompt_seconds_per_token: float = 0.0
    """Cost of a prompt token in seconds: fixed costs included, decodes of the same step excluded."""
    prefill_tokens: int = 0
    """Prompt tokens that this engine computed."""
    prefills: int = 0
    """Prompts that this engine computed to their end."""
    histograms: dict[str, Histogram] = {}
    """Histograms by the names that engine/core/stats.py gives them."""
    parts: Records = {}
    """What the engine's parts report."""

    def record(self, kind: type[R]) -> R | None:
        """Return what a part reports; None in an engine without the part."""
        return record_in(self.parts, kind)

    @property
    def kv_usage(self) -> float:
        """Used fraction of the KV blocks, in the group where it is largest. Snapshots of recurrent states do not count,
        since nearly all of them can be evicted at any time."""
        groups = [blocks for name, blocks in self.group_blocks.items() if name != "states"]
        used = [blocks["used"] / max(1, sum(blocks.values())) for blocks in groups]
        return max([self.blocks_used / self.blocks_total, *used])
