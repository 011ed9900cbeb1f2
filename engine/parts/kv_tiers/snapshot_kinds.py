"""What a snapshot of a scheduler has of tiers."""

from __future__ import annotations

from engine.costs.tier_usage import HeldBlock, TierUsage
from engine.kv_offload.tier_index import NoUsage, TierEntry, TierIndex
from engine.parts.kv_tiers.command_queue import CommandQueue
from engine.parts.kv_tiers.kv_offloading import BlockLoad, KVOffloading, NoTiersBelow
from engine.parts.kv_tiers.tier import NoHashes, Tier, TierHashes
from engine.parts.kv_tiers.tier_writer import Store, TierWriter
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.parts.kv_offload import (
    DropBlocks,
    LoadBlocks,
    StopLoad,
    StoreBlocks,
    TierBlock,
)

KINDS = SnapshotKinds(
    objects=(
        BlockLoad, CommandQueue, HeldBlock, KVOffloading, NoHashes, NoTiersBelow, NoUsage, Store, Tier, TierEntry,
        TierHashes, TierIndex, TierUsage, TierWriter,
    ),
    messages=(DropBlocks, LoadBlocks, StopLoad, StoreBlocks),
    rows=(TierBlock,),
    methods=((CommandQueue, "add"),),
)  # fmt: skip
