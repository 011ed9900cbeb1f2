"""Makes the tiers below an engine's KV cache."""

from __future__ import annotations

from engine.costs.units import nanoseconds
from engine.kv_offload.group_tiers import GroupTiers
from engine.kv_offload.tier_index import TierIndex
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.kv_tiers.tier import Tier
from engine.parts.kv_tiers.tier_courier import TierCourier
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    config, now = setup.loaded.config, setup.clock.monotonic()
    if not config.offloads_kv:
        return Made()
    from engine.parts.kv_tiers.rank.kv_tiers import KVTiers  # it needs packages that other engines do without

    tiers, found = setup.loaded.runner.parts[KVTiers].tiers, list[Tier]()
    assert tiers is not None
    if tiers.host_slots:
        slots = [TierIndex(count, config.kv_offloading_ttl_s, slots=True) for count in tiers.host_slots]
        found.append(Tier("host", slots, [1] * len(slots), tiers.block_bytes))
    for name, size, sizes in (
        ("disk", config.kv_offloading_disk_size, tiers.disk_sizes),
        ("store", config.kv_offloading_store_size, tiers.store_sizes),
    ):
        if size is not None:
            found.append(Tier(name, [TierIndex(int(size * 2**30), config.kv_offloading_ttl_s)], sizes, [1]))
    for usage in (usage for tier in found for usage in tier.usages):
        usage.now_ns = nanoseconds(now)  # what an earlier start has left counts from now on
        setup.tier_usages.append(usage)
    offloading = KVOffloading(
        setup.kv_cache,
        found,
        name_of=tiers.names.of,
        times=setup.step_times,
        timeout_s=config.kv_offloading_timeout_s,
        block_bytes=tiers.block_bytes,
    )
    for block in tiers.found:
        offloading.restore(block.name, block.size, now - block.age_s)
    group = GroupTiers(tiers.worker, setup.group.size, setup.broadcaster, setup.wake)
    return Made([offloading], [TierCourier(offloading, group)])
