"""The KV agents of all ranks of one engine, made known to its rank 0 at the start."""

from __future__ import annotations

import msgspec
from torch import Tensor

from engine.config import HandoffConfig
from engine.distributed.tp_group import TPGroup
from engine.kv_transfer.transport.head_map import HeadShard
from engine.kv_transfer.transport.worker import KVTransferWorker


class RankAgent(msgspec.Struct, frozen=True):
    """Of one rank: where its agent takes commands, and how others reach its memory, by transport."""

    address: str
    description: dict[str, bytes]


def start_agent(
    config: HandoffConfig, cache: Tensor, num_kv_heads: int, group: TPGroup, host: str
) -> tuple[KVTransferWorker, list[RankAgent]]:
    """This rank's agent, and what is known of those of all ranks; every rank has to call it, in `group.starting()`.

    num_kv_heads: of the model. host: at which others reach this rank. Raises StartupError.
    """
    shard = HeadShard(num_kv_heads, group.rank, group.size)
    agent = KVTransferWorker(cache, shard=shard, host=host, transport=config.transport, progress_s=config.progress_s)
    try:
        own = msgspec.json.encode(RankAgent(agent.address, agent.description)).decode()
        return agent, [msgspec.json.decode(other, type=RankAgent) for other in group.exchange(own)]
    except BaseException:
        agent.close()
        raise
