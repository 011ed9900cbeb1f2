"""Opens a channel to other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.options.handoff import HandoffConfig
from engine.parts.setup import PartSetup

if TYPE_CHECKING:  # they need pyzmq
    from engine.kv_transfer.channel import HandoffChannel
    from engine.kv_transfer.transport.ranks import KVWorkerInfo


def open_channel(setup: PartSetup, config: HandoffConfig, ranks: list[KVWorkerInfo]) -> HandoffChannel:
    """ranks: of each rank the worker that reads and writes blocks."""
    from engine.kv_transfer.channel import HandoffChannel

    return HandoffChannel(
        config,
        engine_id=setup.engine_id,
        host=setup.host,
        workers=ranks,
        block_size=setup.loaded.runner.block_size,
        wake=setup.wake,
        key=setup.group.key,
    )
