"""KV and states that a replica keeps, in a model with windows or recurrent states, whose layers keep different
tokens."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.lab.simulator.cost_model import Card, ModelShape, usable_bytes
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.devices.free_memory import FreeMemory
from engine.model.kv_groups import KVCacheSpec
from engine.model.state import state_specs
from engine.parts.kv_groups.kv_cache_groups import kv_cache_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayers:
    """The KV cache groups of a replica, and its snapshots of states."""

    specs: tuple[KVCacheSpec, ...]
    blocks: tuple[int, ...]  #: of each group
    step_tokens: int  #: of a prompt, for which a group with a window has blocks beside those of windows
    snapshots: int = 0
    snapshot_tokens: int = 0  #: from one place where a state may be kept to the next
    snapshot_interval: int = 0  #: tokens from one snapshot inside a long prompt to the next
    block_bytes: tuple[int, ...] = ()  #: of a block of each group on all ranks, and of a snapshot, for costs

    def manager(self, config: EngineConfig) -> tuple[KVCacheManager, list[Part]]:
        """Return the manager and limits that an engine with these sizes builds."""
        size, caching = config.known_block_size, config.enable_prefix_caching
        pools = [
            BlockPool(count, size, caching, null_block=spec.window is not None)
            for spec, count in zip(self.specs, self.blocks, strict=True)
        ]
        states = BlockPool(self.snapshots, self.snapshot_tokens, caching) if self.snapshots else None
        return kv_cache_of(
            self.specs, pools, self.step_tokens, snapshots=states, snapshot_interval=self.snapshot_interval
        )


def divide(model: ModelShape, card: Card, ranks: int, engine: EngineConfig) -> tuple[KVLayers, int]:
    """Divide the memory that the weights leave free, as an engine does when it starts. Returns the sizes, and the
    tokens of the longest sequence. Raises ServingError if not even a short sequence fits."""
    import torch  # takes seconds, and models whose layers are alike do not need it

    from engine.distributed.tp_group import TPGroup
    from engine.kv_transfer.transport import nixl
    from engine.parts.kv_groups.rank import snapshot_memory
    from engine.runner import kv_cache

    cfg, size, tp, gpu = model.config, engine.known_block_size, TPGroup(0, ranks), torch.device("cuda")
    assert cfg is not None
    dtype, states = getattr(torch, cfg.dtype), state_specs(cfg.recurrent, cfg.dtype, ranks)
    running = sum(spec.kept_bytes + spec.row_bytes for spec in states)
    each = FreeMemory(int((usable_bytes(card, ranks) - model.weight_bytes) / ranks), "the GPU's memory")
    needs = kv_cache.group_needs(engine, size, cfg, dtype, tp)
    buffers = nixl.reserved_bytes(engine, [need.block_bytes for need in needs], gpu)
    free = each.less(engine.max_num_seqs * running + buffers)
    snapshots = snapshot_memory.choose_num_snapshots(engine, size, cfg, states, dtype, gpu, tp, free)
    longest = cfg.longest_sequence(engine.max_model_len)
    blocks, longest = kv_cache.choose_num_blocks(
        engine, needs, longest, gpu, free, snapshots * snapshot_memory.snapshot_bytes(states)
    )
    sizes = [need.block_bytes for need in needs] + ([snapshot_memory.snapshot_bytes(states)] if snapshots else [])
    return KVLayers(
        specs=tuple(group.spec for group in cfg.kv_groups),
        blocks=tuple(blocks),
        block_bytes=tuple(ranks * each for each in sizes),
        step_tokens=kv_cache.window_step_tokens(engine, cfg),
        snapshots=snapshots,
        snapshot_tokens=snapshot_memory.snapshot_border(size),
        snapshot_interval=snapshot_memory.snapshot_interval(engine, size, cfg, states, dtype, tp) if states else 0,
    ), longest
