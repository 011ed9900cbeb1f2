"""Simulates tiers below the KV caches: each scheduler's KVOffloading decides, and this module gives the copies a
duration.

A replica copies in both directions at the same time. In each direction, each tier carries out one command after the
other. Copies never fail, and requests wait for them without a deadline.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from cluster.lab.simulator.events import EventLoop
from cluster.lab.simulator.replica import Replica
from cluster.lab.simulator.results import TierUse
from cluster.lab.simulator.spec import ClusterSpec
from engine.core.kv_cache_manager import KVCacheManager
from engine.costs.step_cost import StepTimes
from engine.kv_offload.tier_index import TierIndex
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import Tier
from engine.wire.parts.kv_offload import (
    DropBlocks,
    FoundBlock,
    LoadBlocks,
    StoreBlocks,
    StoreListing,
    TierAnswer,
    TierBlock,
)

LIST_S = 5.0  # until other replicas know what one has written to the store, or deleted from it


def make_tiers(spec: ClusterSpec, kv_cache: KVCacheManager, times: StepTimes) -> KVOffloading:
    """Return what decides about the tiers of one replica. times: step times that the engine learns itself."""
    block_bytes = spec.block_bytes
    return KVOffloading(
        kv_cache,
        [Tier(tier.name, [TierIndex(tier.blocks, slots=tier.name == "host")], [1], [block_bytes])
         for tier in spec.tiers],
        name_of=lambda group, block_hash: block_hash,
        times=times,
        timeout_s=math.inf,
        block_bytes=[block_bytes],
    )  # fmt: skip


class TierTraffic:
    """All copies between the KV caches and the tiers, and what replicas learn of the store that they share."""

    def __init__(
        self,
        spec: ClusterSpec,
        loop: EventLoop,
        replicas: Callable[[], Iterable[Replica]],
        after: Callable[[Replica], None],
    ):
        """replicas: function that returns those that are up. after: function called with each replica affected by an
        event."""
        self._spec, self._loop, self._replicas, self._after = spec, loop, replicas, after
        self._rates = {"bus": spec.host_bytes_per_s} | {tier.name: tier.bytes_per_s for tier in spec.tiers}
        self._free_at: defaultdict[tuple[Replica, str, type], float] = defaultdict(float)  # by tier and direction
        self._in_store: dict[bytes, None] = {}
        self._told: set[Replica] = set()  # replicas that know what was in the store when they started

    def act(self, replica: Replica) -> None:
        """Carry out the commands of a replica's scheduler."""
        if replica not in self._told:
            self._told.add(replica)
            if self._in_store:
                self._loop.at(self._loop.now, self._finish, replica, [listing(self._in_store)])
        for command in replica.tier_commands:
            match command:
                case LoadBlocks(number, blocks):
                    end = self._carry(replica, LoadBlocks, Counter(map(tier_of, blocks)))
                    self._loop.at(end, self._finish, replica, [TierAnswer(number)])
                case StoreBlocks(number, blocks):
                    self._store(replica, number, blocks)
                case DropBlocks(names, in_store):
                    for name in names if in_store else ():
                        self._in_store.pop(name, None)
                    if in_store:
                        self._tell_others(self._loop.now, replica, StoreListing([], list(names)))
        replica.tier_commands.clear()

    def _store(self, replica: Replica, number: int, blocks: list[TierBlock]) -> None:
        copied_at = self._carry(replica, StoreBlocks, Counter(bus=len(blocks)))
        places = Counter(disk=sum(b.on_disk for b in blocks), store=sum(b.in_store for b in blocks))
        written_at = max(copied_at, self._carry(replica, StoreBlocks, +places))
        self._loop.at(copied_at, self._finish, replica, [TierAnswer(number, copied=True)])
        self._loop.at(written_at, self._finish, replica, [TierAnswer(number)])
        if names := [block.name for block in blocks if block.in_store]:
            self._in_store.update(dict.fromkeys(names))
            self._tell_others(written_at, replica, listing(names))

    def _carry(self, replica: Replica, direction: type, blocks: Counter[str]) -> float:
        """Return when the last of these copies ends. blocks: numbers by tier."""
        end = self._loop.now
        for tier, count in blocks.items():
            key = replica, tier, direction
            seconds = count * self._spec.block_bytes / self._rates[tier]
            self._free_at[key] = max(self._loop.now, self._free_at[key]) + seconds
            end = max(end, self._free_at[key])
        return end

    def _tell_others(self, changed_at: float, replica: Replica, found: StoreListing) -> None:
        for other in self._replicas():
            if other is not replica:
                self._loop.at(changed_at + LIST_S, self._finish, other, [found])

    def use(self, replicas: list[Replica]) -> TierUse:
        """Return what the replicas have copied."""
        found = [
            tiers.report() for replica in replicas if (tiers := replica.scheduler.parts.get(KVOffloading)) is not None
        ]
        return TierUse(
            loaded_tokens=sum(stats.hit_tokens for stats in found),
            gigabytes_loaded={
                tier.name: sum(stats.tiers[tier.name].read_bytes for stats in found) / 1e9 for tier in self._spec.tiers
            },
            gigabytes_stored={
                tier.name: sum(stats.tiers[tier.name].write_bytes for stats in found) / 1e9 for tier in self._spec.tiers
            },
        )

    def _finish(self, replica: Replica, answers: list[TierAnswer | StoreListing]) -> None:
        replica.tier_answered(answers, self._loop.now)
        self._after(replica)


def tier_of(block: TierBlock) -> str:
    return "store" if block.in_store else "disk" if block.on_disk else "host"


def listing(names: Iterable[bytes]) -> StoreListing:
    return StoreListing([FoundBlock(name, 1, 0.0) for name in names], [])
