"""Simulates host memory below the KV caches: each scheduler's KVOffloading decides, and this module gives the copies a
duration.

A replica copies in both directions at the same time, and in each direction one command after the other. Copies never
fail, and requests wait for them without a deadline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from cluster.simulator.events import EventLoop
from cluster.simulator.replica import Replica
from cluster.simulator.results import TierUse
from cluster.simulator.spec import ClusterSpec
from engine.core.costs.step_cost import StepTimes
from engine.core.features.kv_offloading import KVOffloading
from engine.core.features.tiers.tier import Tier
from engine.core.kv_cache_manager import KVCacheManager
from engine.kv_offload.tier_index import TierIndex
from engine.wire.kv_offload import LoadBlocks, StoreBlocks, TierAnswer


def host_tier(spec: ClusterSpec, kv_cache: KVCacheManager, times: StepTimes) -> KVOffloading:
    """Return what decides about the host memory of one replica. times: step times that the engine learns itself."""
    block_bytes = spec.block_bytes
    index = TierIndex(spec.host_blocks, slots=True)
    return KVOffloading(
        kv_cache,
        [Tier("host", [index], [1], [block_bytes])],
        name_of=lambda group, block_hash: block_hash,
        times=times,
        timeout_s=math.inf,
        block_bytes=[block_bytes],
    )


class TierTraffic:
    """All copies between the KV caches and host memory."""

    def __init__(self, spec: ClusterSpec, loop: EventLoop, after: Callable[[Replica], None]):
        """after: function called with each replica affected by an event."""
        self._spec, self._loop, self._after = spec, loop, after
        self._free_at: defaultdict[tuple[Replica, type], float] = defaultdict(float)  # by direction

    def act(self, replica: Replica) -> None:
        """Carry out the commands of a replica's scheduler."""
        for command in replica.tier_commands:
            assert isinstance(command, LoadBlocks | StoreBlocks)  # without deadlines and a disk there are no others
            direction = replica, type(command)
            seconds = len(command.blocks) * self._spec.block_bytes / self._spec.host_bytes_per_s
            self._free_at[direction] = end = max(self._loop.now, self._free_at[direction]) + seconds
            answers = [TierAnswer(command.number)]
            if isinstance(command, StoreBlocks):  # what is copied to host memory is written
                answers.insert(0, TierAnswer(command.number, copied=True))
            self._loop.at(end, self._finish, replica, answers)
        replica.tier_commands.clear()

    def use(self, replicas: list[Replica]) -> TierUse:
        """Return what the replicas have copied."""
        found = [stats for replica in replicas if (stats := replica.scheduler.offloading.stats) is not None]
        return TierUse(
            loaded_tokens=sum(stats.hit_tokens for stats in found),
            gigabytes_loaded=sum(stats.tiers["host"].read_bytes for stats in found) / 1e9,
            gigabytes_stored=sum(stats.tiers["host"].write_bytes for stats in found) / 1e9,
        )

    def _finish(self, replica: Replica, answers: list[TierAnswer]) -> None:
        replica.tier_answered(answers, self._loop.now)
        self._after(replica)
