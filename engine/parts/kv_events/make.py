"""Makes what publishes the events of an engine's KV cache."""

from __future__ import annotations

from engine.parts.kv_events.block_events import KVEvents
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    config = setup.loaded.config.kv_events_config
    if config is None or not config.publishes:
        return Made()
    from engine.parts.kv_events.publisher import KVEventSockets  # it needs pyzmq

    return Made(couriers=[KVEvents(setup.kv_cache.groups, KVEventSockets(config), config.use_int_block_hashes)])
