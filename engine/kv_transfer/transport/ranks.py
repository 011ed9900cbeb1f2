"""Starts the KV workers of an engine's ranks, and makes them known to its rank 0."""

from __future__ import annotations

import msgspec
from torch import Tensor

from engine.distributed.tp_group import TPGroup
from engine.kv_transfer.transport.head_map import HeadShard
from engine.kv_transfer.transport.worker import KVTransferWorker
from engine.options.handoff import HandoffConfig


class KVWorkerInfo(msgspec.Struct, frozen=True):
    """What rank 0 knows about the KV worker of one rank."""

    address: str  #: ZMQ address for its commands
    description: dict[str, bytes]  #: description of the rank's memory for other ranks, by transport


def start_kv_worker(
    config: HandoffConfig,
    caches: list[Tensor],
    num_kv_heads: list[int],
    layers: list[range],
    group: TPGroup,
    host: str,
) -> tuple[KVTransferWorker, list[KVWorkerInfo]]:
    """Start this rank's KV worker. Returns it, and the KVWorkerInfo of all ranks. Raises StartupError.

    Every rank must call this inside `group.starting()`.
    caches: one per KV cache group, [num_blocks, layers, parts, kv_heads, block_size, head_dim], contiguous.
    num_kv_heads: KV heads of the whole model, one number per group.
    layers: layers in each cache, as for KVTransferWorker.
    host: IP address at which other ranks reach this one.
    """
    shards = [HeadShard(heads, group.rank, group.size) for heads in num_kv_heads]
    worker = KVTransferWorker(
        caches,
        shards=shards,
        layers=layers,
        stage=group.stage,
        host=host,
        transport=config.transport,
        progress_s=config.progress_s,
        key=group.key,
    )
    try:
        own = msgspec.json.encode(KVWorkerInfo(worker.address, worker.description)).decode()
        return worker, [msgspec.json.decode(other, type=KVWorkerInfo) for other in group.exchange(own)]
    except BaseException:
        worker.close()
        raise
