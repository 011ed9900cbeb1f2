"""Serve's request router, which asks a Balancer. Serve creates one router for every handle: each ingress has one for
decode replicas, each decode replica has one for prefill replicas."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments import ray_compat
from deployments.ray_compat import CallRouter, engine_id_of, engine_ids
from deployments.routing.balancer import Balancer
from deployments.routing.config import Role, RouterOptions
from deployments.routing.routing_context import CallOutcome, RoutingContext
from deployments.routing.subscriber import KVEventSubscriber
from engine.wire.generate_request import ModelIdentity
from engine.wire.messages import EngineUpdate


def eligible_replicas(
    candidates: list[RunningReplica], call: RoutingContext, roles: Mapping[str, Role] = MappingProxyType({})
) -> list[RunningReplica]:
    """Return the replicas that serve the call's model and have its role. Replicas to avoid are left out if others
    remain, and then those with other numerics than the call's.

    If no replica serves that model, all are eligible, and will refuse the call. If none has the role, the others
    answer instead. roles: roles of engines whose roles can change.
    """
    fitting = [r for r in candidates if call.model in (None, _model_of(r))] or candidates
    fitting = [r for r in fitting if roles.get(engine_id_of(r.replica_id), call.role) == call.role] or fitting
    fitting = [r for r in fitting if engines_of(r).keys().isdisjoint(call.avoid)] or fitting
    return [r for r in fitting if r.replica_metadata.get("numerics") == call.numerics] or fitting


def engines_of(replica: RunningReplica) -> dict[str, str]:
    """Return the ids of a replica's engines, each with the address at which it takes commands; "" if unknown."""
    addresses = replica.replica_metadata.get("commands_to", "").split() or [""]
    return dict(zip(engine_ids(engine_id_of(replica.replica_id), len(addresses)), addresses, strict=True))


def _model_of(replica: RunningReplica) -> ModelIdentity:
    metadata = replica.replica_metadata
    return ModelIdentity(metadata.get("weights", ""), metadata.get("vocabulary", ""))


class EngineRouter(CallRouter):
    """Request router that asks a Balancer, and feeds it the reports of the engines. Serve manages the replicas and
    their limits."""

    _balancer: Balancer  # made by the first call, like the subscriber: some handles only ask for statuses
    _subscriber: KVEventSubscriber | None = None
    _receive_task: asyncio.Task[None] | None = None

    def initialize_state(self, **options: Any) -> None:
        """Called by Serve with RequestRouterConfig.request_router_kwargs: the fields of RouterOptions, perhaps those of
        another version, in which the deployment is now."""
        self._options = msgspec.convert(options, RouterOptions)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        call = next(arg for arg in pending_request.args if isinstance(arg, RoutingContext))
        if self._subscriber is None:
            key = ray_compat.cluster_key()  # does not block: cached since the process started
            config, block_size = self._options.pools[call.role], self._options.block_size
            self._balancer = Balancer(config, call.role, block_size, random.Random())
            self._subscriber = KVEventSubscriber(ray.util.get_node_ip_address(), self._apply, key)
            self._receive_task = asyncio.get_running_loop().create_task(self._subscriber.run())
            self._subscribe()
        pending_request.routing_context.should_backoff = True  # else Serve would retry a full pool without a pause
        eligible = eligible_replicas(candidate_replicas, call, self._balancer.roles)
        with_capacity = self.select_available_replicas(eligible) or eligible
        replicas = {engine_id: replica for replica in with_capacity for engine_id in engines_of(replica)}
        self._balancer.use_stats(call.stats)
        self._balancer.use_observer(call.observer)
        decision = self._balancer.choose(call.prompt, list(replicas))
        call.holder = decision.holder
        more = f", {decision.holder.num_tokens} by {decision.holder.engine.engine_id}" if decision.holder else ""
        best = call.engine = decision.engines[0]
        role = f" ({self._balancer.roles[best]})" if best in self._balancer.roles else ""
        call.note(f"routed to {best}{role}: {decision.reason}, {decision.cached_tokens} tokens cached there{more}")
        if decision.lost_hold:
            call.note("a part of the prompt was held on a replica that is gone: the hold is broken")
        loop = asyncio.get_running_loop()
        end = partial(self._end, call.prompt.request_id, list(engines_of(replicas[best])))
        call.placed(partial(loop.call_soon_threadsafe, end))
        ranked = {replicas[engine_id].replica_id: replicas[engine_id] for engine_id in decision.engines}
        return [[replica] for replica in ranked.values()]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._subscribe()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._subscribe()

    def _subscribe(self) -> None:
        """Subscribe to the engines of the current replicas, and to no others."""
        engines = {e: address for r in self.curr_replicas.values() for e, address in engines_of(r).items()}
        if self._subscriber is not None:
            self._balancer.keep(engines, time.monotonic())
            self._subscriber.subscribe({engine_id: address for engine_id, address in engines.items() if address})

    def _apply(self, update: EngineUpdate) -> bool:
        understood = self._balancer.update(update)
        self._balancer.count_broken_holds(time.monotonic())
        for replica_id, replica in self.curr_replicas.items():
            engines = engines_of(replica)
            if update.engine_id in engines:
                # correct Serve's own count of open calls: it learns late that gRPC calls have ended, and polls
                # replicas that had no call for some seconds
                loads = [self._balancer.placements.engine(engine_id).load for engine_id in engines]
                self.on_new_queue_len_info(replica_id, sum(load.sequences for load in loads))
        return understood

    def _end(self, request_id: str, engines: Sequence[str], outcome: CallOutcome) -> None:
        """Record that a call has ended. engines: those of its replica."""
        self._balancer.end(request_id, confirmed=outcome == "answered")
        for engine_id in engines if outcome == "lost" else ():
            self._balancer.mark_unhealthy(engine_id)
