"""Opens the tiers below the KV cache of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from engine.config import EngineConfig
from engine.devices.device_kind import kind_of
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.kv_offload.disk import TEMPORARY_KEY, DiskFolder, delete_stale, sealed_size
from engine.kv_offload.sealing import OVERHEAD, BlockNames, Sealer, choose_secret
from engine.kv_offload.store import StoreFolder
from engine.kv_offload.store_lister import LIST_S, StoreLister
from engine.kv_offload.tier_worker import TierWorker
from engine.user_folder import user_folder
from engine.wire.parts.kv_offload import FoundBlock

GIB = 2**30
SIZES = ("kv_offloading_size", "kv_offloading_disk_size", "kv_offloading_store_size")
LAYOUT_VERSION = 1  # raised when a block has another layout


@dataclass(frozen=True, slots=True)
class RankTiers:
    """The tiers of one rank."""

    worker: TierWorker
    names: BlockNames
    block_bytes: list[int]
    """Bytes of a block of each KV cache group, on all ranks together."""
    host_slots: list[int]
    """Blocks of each group in host memory; empty without this tier."""
    disk_sizes: list[int]
    """Disk space that a block of each group takes, on all ranks together; empty without this tier."""
    store_sizes: list[int]
    """The same in the store."""
    found: list[FoundBlock]
    """Blocks that earlier starts have left on the disks of all ranks, oldest first."""


def open_tiers(config: EngineConfig, caches: Sequence[Tensor], tp: TPGroup, scope: str, opened: ExitStack) -> RankTiers:
    """Open the tiers of a rank whose config has some. Every rank must call this within `group.starting()`.

    caches: as for DeviceBlocks. scope: text that contains everything that determines the content of a block with a
    given hash, apart from rank and device. opened: exit stack that closes the tiers. Raises StartupError.
    """
    own_bytes = [cache[:1].nbytes for cache in caches]
    of_ranks: list[list[int]] = [json.loads(text) for text in tp.exchange(json.dumps(own_bytes))]
    block_bytes = [sum(sizes) for sizes in zip(*of_ranks, strict=True)]
    if not all(block_bytes):
        key = next(key for key in SIZES if getattr(config, key) is not None)
        raise ConfigError(key, getattr(config, key), "left out, because this model keeps no KV in blocks")
    slots = host_slots(config, [len(cache) for cache in caches], block_bytes)
    disk_sizes = sizes_in(config, "kv_offloading_disk_size", of_ranks, sealed_size)
    store_sizes = sizes_in(config, "kv_offloading_store_size", of_ranks, lambda size: size + OVERHEAD)
    secret, disk, store, lister = choose_secret(config.kv_offloading_key_file, tp.key), None, None, None
    names = BlockNames(secret)
    key = f"{TEMPORARY_KEY}{names.folder('')}-" if config.kv_offloading_key_file is None else ""
    # numbers differ between devices and numbers of ranks, and a rank's file has its heads and layers only
    shared = f"{scope} object={LAYOUT_VERSION} device={kind_of(caches[0].device)!r} ranks={tp.size}"
    own = f"{shared} rank={tp.rank}"
    if disk_sizes:
        root = user_folder(config.kv_offloading_dir)
        disk = DiskFolder(root, key + names.folder(own), Sealer(secret, own))
        opened.callback(disk.close)
        delete_stale(root, disk.path, config.kv_offloading_ttl_s, key)
    if config.kv_offloading_store is not None:
        if config.kv_offloading_key_file is None and tp.key is None:
            limit = "a key file, because without a cluster no other engine has this engine's key"
            raise ConfigError("kv_offloading_key_file", None, limit)
        folder, sealer = key + names.folder(shared), Sealer(secret, own)
        store = StoreFolder(config.kv_offloading_store, folder, sealer, rank=tp.rank, ranks=tp.size)
        if tp.rank == 0:
            lister = StoreLister(store, LIST_S, config.kv_offloading_ttl_s, key)
    found = [] if disk is None else on_all_ranks(disk, tp)
    worker = TierWorker(caches, host_slots=slots, rank=tp.rank, disk=disk, store=store, lister=lister)
    opened.callback(worker.close)
    return RankTiers(worker, names, block_bytes, slots, disk_sizes, store_sizes, found)


def sizes_in(
    config: EngineConfig, key: str, of_ranks: list[list[int]], size_in_tier: Callable[[int], int]
) -> list[int]:
    """Return the space that a block of each group takes in a tier, on all ranks together; empty without this tier.
    of_ranks: bytes of a block of each group on each rank. size_in_tier: space that so many bytes take. Raises
    ConfigError."""
    size = getattr(config, key)
    if size is None:
        return []
    sizes = [sum(map(size_in_tier, group)) for group in zip(*of_ranks, strict=True)]
    if size * GIB < max(sizes):
        raise ConfigError(key, size, "enough for one block on all ranks")
    return sizes


def host_slots(config: EngineConfig, counts: list[int], block_bytes: list[int]) -> list[int]:
    """Return how many blocks of each group host memory holds, in the same proportions as on the device."""
    size = config.kv_offloading_size
    if size is None:
        return []
    device = sum(count * each for count, each in zip(counts, block_bytes, strict=True))
    slots = [int(count * size * GIB / device) for count in counts]
    if not all(slots):
        raise ConfigError("kv_offloading_size", size, "enough for one block of each KV cache group")
    return slots


def on_all_ranks(disk: DiskFolder, tp: TPGroup) -> list[FoundBlock]:
    """Return the blocks for which every rank has its part, with their sizes on all ranks together. Deletes this rank's
    part of all other blocks."""
    found = disk.find()
    of_ranks = [json.loads(text) for text in tp.exchange(json.dumps({b.name.hex(): b.size for b in found}))]
    everywhere = set.intersection(*map(set, of_ranks))
    for block in found:
        if block.name.hex() not in everywhere:
            disk.delete(block.name)
    return [
        block._replace(size=sum(sizes[block.name.hex()] for sizes in of_ranks))
        for block in found
        if block.name.hex() in everywhere
    ]
