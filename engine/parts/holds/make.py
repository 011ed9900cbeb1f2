"""Makes the holds of an engine."""

from __future__ import annotations

from engine.parts.holds.hold_courier import HoldCourier
from engine.parts.holds.holds import Holds
from engine.parts.holds.no_holds import NoHolds
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    config, fetching = setup.loaded.config, setup.part("kv_fetching", KVFetching)
    courier = HoldCourier(None if fetching is None else fetching.peer)
    if not (config.max_held_share and config.enable_prefix_caching) or setup.loaded.model.bidirectional:
        return Made([NoHolds()], [courier])
    holds = Holds(
        setup.kv_cache,
        setup.part("kv_tiers", KVOffloading),
        setup.usages,
        max_model_len=setup.loaded.runner.max_model_len,
        max_share=config.max_held_share,
        max_share_per_client=config.max_held_share_per_client,
        max_ttl_s=config.max_hold_s,
    )
    holds.update(setup.clock.monotonic())  # restores those on disk, before any block is evicted or too old
    return Made([holds], [courier])
