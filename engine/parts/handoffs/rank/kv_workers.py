"""The worker that moves KV between this rank and ranks of other engines."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.devices.free_memory import FreeMemory
from engine.kv_transfer.transport import nixl
from engine.kv_transfer.transport.ranks import KVWorkerInfo, start_kv_worker
from engine.kv_transfer.transport.worker import KVTransferWorker
from engine.runner.kv_cache import group_needs
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import StepMemory


class KVWorkers(RankPart):
    name = "kv workers"
    of_ranks: list[KVWorkerInfo]
    """The workers of all ranks."""

    def __init__(self, setup: RankSetup):
        self._setup = setup
        self._worker: KVTransferWorker | None = None

    def reserve(self, free: FreeMemory) -> FreeMemory:
        """Keep room for buffers in which KV arrives."""
        setup = self._setup
        needs = group_needs(setup.config, setup.block_size, setup.model, setup.kv_dtype, setup.tp)
        return free.less(
            nixl.reserved_bytes(setup.config.of(EngineConfig), [need.block_bytes for need in needs], setup.torch_device)
        )

    def allocate(self, memory: StepMemory) -> None:
        self._memory = memory

    def start(self, run: Run, runner: LayerRunner) -> None:
        setup, own, whole = self._setup, self._setup.model, self._setup.whole
        config = setup.config.of(EngineConfig).handoff
        assert config is not None
        heads = [group.spec.num_kv_heads for group in own.kv_groups]
        groups = zip(whole.kv_groups, own.kv_groups, strict=True)
        layers = [positions(group.layers, held.layers) for group, held in groups]
        if whole.recurrent is not None and own.recurrent is not None and self._memory.more_blocks:
            heads.append(setup.tp.size)  # each rank reads its part of a state from the same rank of the other engine
            layers.append(positions(whole.recurrent.layers, own.recurrent.layers))
        self._worker, self.of_ranks = start_kv_worker(config, self._memory.blocks, heads, layers, setup.tp, setup.host)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def positions(whole: Sequence[int], own: Sequence[int]) -> range:
    """Return the positions of a stage's layers, which are adjacent, among those of the whole model."""
    start = whole.index(own[0]) if own else 0
    return range(start, start + len(own))
