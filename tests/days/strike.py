"""Faults, as they strike a cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.errors import EngineUnavailable
from engine.wire.messages import ResetPrefixCache
from engine.wire.parts.holds import ReleaseHolds
from tests.days.cluster import Replica
from tests.days.holds import NAMES

if TYPE_CHECKING:
    from tests.days.day import Fault
    from tests.days.world import World

# losses of tokens or engines
LOSSES = ("kill ingress", "kill engine", "kill replica", "kill node", "pause", "freeze", "suspend", "cut",
          "lose tokens", "drain", "scale")  # fmt: skip
# moments at which a fault may strike, as soon as one of the engines is there
MOMENTS = {
    "kill engine": ("reads", "leases"),
    "kill node": ("reads", "leases"),
    "pause": ("reads", "leases"),
    "freeze": ("reads", "reads", "leases"),
    "suspend": ("reads", "reads", "reads"),
    "cut": ("reads", "leases"),
    "datagrams": ("reads",),
    "move": ("runs",),
    "drain": ("runs",),
    "lose tokens": ("runs",),
    "lose updates": ("runs",),
    "slow answers": ("runs",),
    "reset cache": ("computes",),
}
PATIENCE_S, LOOK_S = 3.0, 0.005  # for how long a fault waits for its moment, and how often it looks


def strike(world: World, fault: Fault) -> None:
    """Let a fault strike, now or at its moment."""
    cluster, loop = world.cluster, world.loop
    replicas, ingresses = [r for d in cluster.deployments.values() for r in d.replicas], cluster.ingresses
    if fault.moment == "computes a key":
        ingresses = [each.ingress for each in cluster.computations if each.running and each.ingress.up]
    elif fault.moment:
        replicas = [replica for replica in replicas if _is_at(fault.moment, replica)]
    if not (replicas and ingresses):
        if fault.moment and loop.time() < fault.at + PATIENCE_S:
            loop.call_later(LOOK_S, strike, world, fault)
        return
    replica, other = replicas[fault.number % len(replicas)], replicas[fault.other % len(replicas)]
    ingress = ingresses[fault.other % len(ingresses)]
    cluster.note(f"FAULT {fault.kind} {replica.engine_id} {other.engine_id} {fault.seconds:.2f} s {fault.moment}")
    cluster.seen[f"fault {fault.kind}{fault.moment and ' while it '}{fault.moment}"] += 1
    engine, later = replica.engine, loop.call_later
    match fault.kind:
        case "kill ingress":
            cluster.kill_ingress(ingress)
        case "disk full":
            cluster.disk_full_until = loop.time() + fault.seconds
        case "stand still":
            cluster.stop_ingress(ingress, fault.seconds)
        case "store away":
            cluster.store_fails = True
            cluster.redis.go_away(fault.seconds, forgets=fault.number % 2 == 0)
        case "kill engine":
            cluster.engine_ended(engine, "rank 0 died")
        case "kill replica":
            replica.die(engine_lives_s=fault.seconds / 4)
        case "kill node":
            engine.die()
            replica.die()
        case "pause" | "freeze":
            engine.pause(reads_go_on=fault.kind == "freeze")
            later(fault.seconds, engine.resume)
        case "suspend":
            engine.pause(reads_go_on=True)
            later(fault.seconds, engine.resume)
            now, lease_s = loop.time(), cluster.size.lease_s
            start = now + fault.other / 200 * lease_s
            cluster.network.deafen(replica.node, start, now + fault.seconds + fault.number / 50 * lease_s)
        case "cut":
            node = ingress.node if replica is other else other.node
            if fault.moment:
                node = _other_end(replica) or node
            cluster.network.cut(replica.node, node, fault.seconds)
        case "lose tokens":
            link = f"{replica.engine_id} {ingress.inboxes.address}"
            cluster.network.break_link(replica.node, ingress.node, link, fault.seconds / 4)
        case "lose updates" | "slow answers" if not replica.deployment.routers:
            pass
        case "lose updates":
            routers = replica.deployment.routers
            router = routers[fault.other % len(routers)]
            link = f"{replica.engine_id} {router.address}"
            cluster.network.break_link(replica.node, router.node, link, fault.seconds)
        case "slow answers":
            routers = replica.deployment.routers
            router = routers[fault.other % len(routers)]
            cluster.network.stop_link(replica.node, router.node, f"answer {router.name}", fault.seconds)
        case "datagrams":
            cluster.network.loss, cluster.network.repeats = 0.5, 0.5
            later(fault.seconds, setattr, cluster.network, "loss", world.day.loss)
        case "move":
            if replica.deployment.role == "decode":
                replica.move_requests(1 + fault.number % 3)
        case "switch role":
            if cluster.size.roles and replica.deployment.role == "decode":
                replica.switch_role()
        case "drain":
            if not replica.stopping:
                replica.tasks.append(asyncio.ensure_future(replica.depart()))
        case "scale":
            if not cluster.size.roles:
                replica.deployment.scale(1 + fault.number % 3)
        case "release holds":
            with suppress(EngineUnavailable):
                replica.tell(ReleaseHolds(NAMES[fault.other % len(NAMES)]))
        case "reset cache":
            with suppress(EngineUnavailable):
                replica.tell(ResetPrefixCache())
        case "flip" if engine.tiers is not None:
            cluster.flipped = True
            engine.tiers.flips = True


def _is_at(moment: str, replica: Replica) -> bool:
    """Return whether an engine reads KV, holds KV that another engine reads, computes a prompt or runs a sequence."""
    engine = replica.engine
    if not engine.alive:
        return False
    protocols = [channel.endpoint._protocol for channel in engine.channels]
    running = engine.core.scheduler.queue.running
    match moment:
        case "reads":
            return any(handoff.reading is not None for p in protocols for handoff in p.decode_handoffs.values())
        case "leases":
            return any(protocol.prefill_handoffs for protocol in protocols)
        case "computes":
            return any(0 < request.computed < len(request.tokens) - 1 for request in running)
        case "runs":
            return any(request.num_output > 1 for request in running)
    raise ValueError(moment)


def _other_end(replica: Replica) -> str | None:
    """Return the node of an engine with which this one has a handoff."""
    engines = replica.cluster.engines
    protocols = [channel.endpoint._protocol for channel in replica.engine.channels]
    peers = [handoff.source for protocol in protocols for handoff in protocol.decode_handoffs.values()]
    peers += [handoff.decode for protocol in protocols for handoff in protocol.prefill_handoffs.values()]
    return next((engines[peer.engine_id].node for peer in peers if peer and peer.engine_id in engines), None)
