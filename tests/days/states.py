"""What states a simulated cluster is in, coarsely: of its engines, its handoffs and its ingresses. Counts stop at
`MOST`."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.holds.holds import Holds
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading

if TYPE_CHECKING:
    from tests.days.cluster import Cluster
    from tests.days.engine import Engine

MOST = 2


def states_of(cluster: Cluster) -> Iterator[Hashable]:
    """Yield the states in which the parts of a cluster are now."""
    engines = [engine for engine in cluster.engines.values() if engine.alive]
    for engine in engines:
        yield _of_engine(engine)
        yield from _of_handoffs(cluster, engine)
    away = cluster.redis.is_away
    for ingress in cluster.ingresses:
        queue, jobs = ingress.admission, ingress.jobs._live
        running = sum(each.running for each in cluster.computations if each.ingress is ingress)
        yield ("ingress", ingress.up, ingress.is_behind, away, _few(queue.num_running), _few(queue.num_waiting),
               _few(len(jobs)), _few(running))  # fmt: skip
    for role, deployment in cluster.deployments.items():
        stopping = sum(replica.stopping for replica in deployment.replicas)
        yield "pool", role, len(deployment.replicas), stopping, deployment.state()


def digests(states: set[Hashable]) -> frozenset[int]:
    """Return a number for each state, the same in every process."""
    return frozenset(zlib.crc32(repr(state).encode()) for state in states)


def _few(count: int) -> int:
    return count if count < MOST else MOST


def _of_engine(engine: Engine) -> Hashable:
    scheduler, pool = engine.core.scheduler, engine.core.scheduler.kv_cache.pool
    handoffs, protocol = scheduler.parts[Handoffs], engine.channel.endpoint._protocol
    fetching, offloading = scheduler.parts.get(KVFetching), scheduler.parts.get(KVOffloading)
    holds, available = scheduler.parts.get(Holds), pool.num_available
    return (
        "engine", handoffs.role or engine.engine_id[0], engine.paused, engine.reads_go_on,
        _few(len(scheduler.queue.running)), _few(len(scheduler.queue.waiting)), len(scheduler.planned),
        0 if not available else 1 if available < 4 else 2, _few(pool.num_cached),
        _few(len(handoffs.remote.receiving)), _few(len(handoffs.for_others.leased)),
        fetching is not None and fetching.moving, offloading is not None and offloading.moving,
        0 if holds is None else _few(len(holds.table.by_end)),
        tuple(sorted({handoff.state.value for handoff in protocol.decode_handoffs.values()})),
        tuple(sorted({handoff.state for handoff in protocol.prefill_handoffs.values()})),
        bool(protocol._quarantined), _few(scheduler.out.num_posted),
    )  # fmt: skip


def _of_handoffs(cluster: Cluster, engine: Engine) -> Iterator[Hashable]:
    """Both ends of each handoff of an engine that gets KV."""
    for channel in engine.channels:
        for handoff_id, handoff in channel.endpoint._protocol.decode_handoffs.items():
            received, request = handoff.receive_state, handoff.remote_request
            known = "unknown", False, False
            if handoff.source is not None and (source := cluster.engine_of_epoch(handoff.source.epoch)) is not None:
                held = source.channel.endpoint._protocol.prefill_handoffs.get(handoff_id)
                known = "" if held is None else held.state, source.paused, held is None or held.lease == handoff.lease
            yield (
                "handoff", handoff.state.value, handoff._missed and 1, handoff.failure and handoff.failure[0],
                engine.paused, engine.reads_go_on, handoff.reading is not None, _few(received.read),
                _few(received.validated), received.first is not None, request.skip > 0, request.attempt > 1, *known,
            )  # fmt: skip
