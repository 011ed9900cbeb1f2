"""Makes what fetches KV from the caches of other engines."""

from __future__ import annotations

from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    config, handoffs = setup.loaded.config.handoff, setup.part("handoffs", Handoffs)
    if config is None or handoffs is None or config.role not in ("decode", "replica"):
        return Made()
    if not config.enable_prefix_fetching:
        return Made()
    peer = handoffs.requests.peer
    assert peer is not None
    fetching = KVFetching(
        setup.kv_cache,
        handoffs,
        setup.part("kv_tiers", KVOffloading),
        peer=peer,
        times=setup.step_times,
        timeout_s=config.fetch_timeout_s,
        block_bytes=setup.loaded.block_bytes,
    )
    return Made([fetching])
