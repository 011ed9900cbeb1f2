"""What must not be left when a day is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deployments.routing.prefix_index import block_keys
from engine.parts.costs.cost_ledger import CostLedger
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.holds.holds import Holds
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from tests.days.tiers import check_content

if TYPE_CHECKING:
    from tests.days.cluster import Cluster
    from tests.days.engine import Channel


def check_that_nothing_is_left(cluster: Cluster, forgotten: bool) -> None:
    """forgotten: whether a minute has passed, for which engines remember what has ended."""
    for ingress in cluster.ingresses:
        nothing(f"{ingress.node}: handlers", ingress.tasks)
        nothing(f"{ingress.node}: jobs", ingress.jobs._live)
        nothing(f"{ingress.node}: inboxes", ingress.inboxes._inboxes)
        nothing(f"{ingress.node}: engines of requests", ingress.inboxes._working)
        nothing(f"{ingress.node}: admitted", ingress.admission.num_running + ingress.admission.num_waiting)
        nothing(f"{ingress.node}: starts", ingress.admission._starts)
        nothing(f"{ingress.node}: timelines", ingress.context.timelines.num_live)
        nothing(f"{ingress.node}: placements", ingress.router.balancer.placements._placements)
    for deployment in cluster.deployments.values():
        for replica in deployment.replicas:
            name, core, channel = replica.engine_id, replica.engine.core, replica.engine.channel
            nothing(f"{name}: calls", replica._calls)
            nothing(f"{name}: tasks", replica.calls)
            nothing(f"{name}: answers", replica.num_answers)
            for dispatcher in replica._dispatchers.values():
                nothing(f"{name}: dispatched", dispatcher._calls)
                placements = dispatcher.pool.router.balancer.placements  # type: ignore[attr-defined]
                nothing(f"{name}: placements", placements._placements)
            if not replica.engine.alive or replica.engine.paused:
                continue
            core.scheduler.check()
            assert sum(core.observers[CostLedger].ns.values()) == core.observers[CostLedger].wall_ns, "time is lost"
            nothing(f"{name}: work", core.scheduler.has_work)
            nothing(f"{name}: live requests", core.scheduler.queue.live)
            holds, used = core.scheduler.parts.get(Holds), core.scheduler.kv_cache.pool.num_used
            nothing(f"{name}: blocks in use", used - (0 if holds is None else holds.report().device_blocks))
            nothing(f"{name}: receiving", core.scheduler.parts[Handoffs].remote.receiving)
            nothing(f"{name}: leased", core.scheduler.parts[Handoffs].for_others.leased)
            fetching, offloading = core.scheduler.parts.get(KVFetching), core.scheduler.parts.get(KVOffloading)
            nothing(f"{name}: fetches", fetching is not None and fetching.moving)
            nothing(f"{name}: opened handoffs", core.scheduler.parts[Handoffs].remote.opened_at)
            nothing(f"{name}: deltas", replica.engine.endpoint._deltas)
            nothing(f"{name}: ended", replica.engine.endpoint._ended)
            check_content(replica.engine)
            for block, key in enumerate(core.scheduler.kv_cache.pool._hash):
                if key is not None:
                    kv = replica.engine.runner.content(block)
                    assert kv == replica.engine.named_kv[key], f"block {block} has other KV than its name says"
            for router in [] if replica.stopping else deployment.routers:
                record = router.balancer.placements.engine(name)
                nothing(f"{router.name}: load of {name}", record.load.sequences + record.load.queued_tokens)
                names = [
                    *core.scheduler.kv_cache.pool.block_hashes(),
                    *([] if offloading is None else offloading.hashes.all()),
                ]
                there = set(block_keys(b"".join(names)))
                untold = set(block_keys(b"".join([] if offloading is None else offloading.hashes._gone or [])))
                nothing(f"{router.name}: blocks of {name}", (there ^ record.prefixes.stored.to_set()) - untold)
            check_protocol(name, channel)
            if forgotten:
                nothing(f"{name}: released", channel.endpoint._protocol._released)


def check_protocol(name: str, channel: Channel) -> None:
    """Check that an engine has no handoff. name: of the engine."""
    protocol = channel.endpoint._protocol
    nothing(f"{name}: decode handoffs", protocol.decode_handoffs)
    nothing(f"{name}: prefill handoffs", protocol.prefill_handoffs)
    nothing(f"{name}: asked", protocol._asked)
    nothing(f"{name}: reads", protocol._reads)
    nothing(f"{name}: worker's reads", channel._reads)


def check_that_nothing_failed(cluster: Cluster, scales: bool) -> None:
    """Check what must hold after a day without faults. scales: as in Day; then a request may be on its way to a replica
    that has just ended, and is sent again."""
    for ingress in cluster.ingresses:
        for reason in ("tokens_lost",) if scales else ("engine_unavailable", "tokens_lost"):
            nothing(f"{ingress.node}: replays, {reason},", ingress.stats.replays[reason])
    for engine in cluster.engines.values():
        if (
            engine.engine_id.startswith("p") and not scales
        ):  # a request that moves may wait too long for its next engine
            nothing(f"{engine.engine_id}: leases that expired", engine.channel.endpoint.stats().lease_expiries)


def nothing(what: str, left: Any) -> None:
    assert not left, f"{what} left: {left if isinstance(left, int) else list(left)[:5]}"
