"""Routers of a simulated cluster, and Serve's calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.remote_dispatcher import PoolState
from deployments.routing.balancer import Balancer
from deployments.routing.config import Role, RoutingConfig
from deployments.routing.prompt_digest import PromptDigester
from deployments.routing.routing_context import CallOutcome, RoutingContext
from deployments.routing.stats import RoutingStats
from deployments.routing.subscriptions import Subscriptions
from engine.errors import EngineUnavailable, ServingError
from engine.wire.messages import EngineUpdate
from engine.wire.parts.adapter import ModelAdapter, digest_of
from engine.wire.parts.images import images_in
from engine.wire.remote_request import RemoteRequest
from tests.days.engine import Report
from tests.days.stills import guarded

if TYPE_CHECKING:
    from tests.days.cluster import Deployment, Replica

UPDATE = msgspec.msgpack.Decoder(EngineUpdate)


class Router(Subscriptions):
    """A handle's router, as EngineRouter and Serve are together."""

    def __init__(self, deployment: Deployment, node: str, name: str, role: Role):
        """role: of the calls."""
        super().__init__(self._apply)
        self.deployment, self.cluster = deployment, deployment.cluster
        cluster, self.node, self.name, self.role = deployment.cluster, node, name, role
        self.address = f"router:{name}"
        self.open, self.num_queued = True, 0
        self.replicas: dict[str, Replica] = {}
        self.balancer = Balancer(
            RoutingConfig(policy=cluster.size.routing),  # type: ignore[arg-type]
            role,
            4,
            random.Random(cluster.rng.getrandbits(64)),
        )
        cluster.addresses[self.address] = node, guarded(self._take)
        self.told = guarded(self.update)
        deployment.routers.append(self)
        self._renewing = asyncio.ensure_future(self.renew())
        self.update([r for r in deployment.replicas if not r.stopping])

    def send(self, address: str, message: bytes) -> None:
        self.cluster.send(self.node, self.name, address, message)

    def forget(self, address: str) -> None:
        pass

    def close(self) -> None:
        self.open = False
        self._renewing.cancel()
        self.deployment.routers.remove(self)

    def update(self, replicas: Sequence[Replica]) -> None:
        if not self.open:
            return
        self.replicas = {replica.engine_id: replica for replica in replicas}
        self.balancer.keep(self.replicas, asyncio.get_running_loop().time())
        self.subscribe({name: replica.engine.address for name, replica in self.replicas.items()})

    def _take(self, report: Report) -> None:
        """Apply an update, and check that no request counts twice: in the load that the engine reports, and as one that
        is on its way there."""
        if not self.open:
            return
        update, placements = UPDATE.decode(report), self.balancer.placements
        self.handle(update)
        placements.check()
        record = placements.engine(update.engine_id)
        if record.last_update == update.number:
            twice = record.pending.keys() & report.live
            assert not twice, "a router counts a request twice"

    def _apply(self, update: EngineUpdate) -> bool:
        self.cluster.seen["snapshot" if update.snapshot else "update"] += 1
        return self.balancer.update(update)

    def _end(self, request_id: str, engine_id: str, outcome: CallOutcome) -> None:
        self.balancer.end(request_id, confirmed=outcome == "answered")
        if outcome == "lost":
            self.balancer.mark_unhealthy(engine_id)

    async def call(self, requests: list[EncodedRequest], context: RoutingContext) -> None:
        """A Serve call, as ServePool._answer sees it."""
        outcome: CallOutcome = "ended"
        try:
            await self._call(requests, context)
            outcome = "answered"
        except EngineUnavailable:
            outcome = "lost"
            raise
        finally:
            context.close(outcome)

    async def _call(self, requests: list[EncodedRequest], context: RoutingContext) -> None:
        network, loop = self.cluster.network, self.cluster.loop
        self.num_queued += 1
        try:
            while not self.replicas:
                await asyncio.sleep(0.05)
        finally:
            self.num_queued -= 1
        roles = self.balancer.roles
        fitting = [name for name in self.replicas if roles.get(name, self.role) == self.role] or list(self.replicas)
        engines = [name for name in fitting if name not in context.avoid] or fitting
        decision = self.balancer.choose(context.prompt, engines)
        context.holder = decision.holder
        best = decision.engines[0]
        context.placed(partial(self._end, context.prompt.request_id, best))
        replica = self.replicas[best]
        self.cluster.note(f"{self.name}: {requests[0].request_id} to {best}: {decision.reason}")
        if context.holder is not None and self.role == "decode":
            requests = [request.with_holder(context.holder) for request in requests]
        answer: asyncio.Future[None] = loop.create_future()
        call = Call(self, replica, requests, answer)
        network.send(self.node, replica.node, f"call {self.name}", call.arrive)
        try:
            await answer
        except asyncio.CancelledError:
            if self.open:  # a process that is gone cancels nothing
                network.send(self.node, replica.node, f"call {self.name}", call.cancel)
            raise
        except EngineUnavailable:
            if not replica.up:  # Serve's router notices a dead actor when its call fails
                self.update([other for other in self.replicas.values() if other is not replica])
            raise


class Call:
    """One call of a replica's method."""

    def __init__(self, router: Router, replica: Replica, requests: list[EncodedRequest], answer: asyncio.Future[None]):
        self._router, self._replica, self._requests, self._answer = router, replica, requests, answer
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._watch()

    def _watch(self) -> None:
        """The caller learns that the replica's process is gone, at some time."""
        if not self._answer.done():
            if self._replica.up:
                self._router.cluster.loop.call_later(0.25, self._watch)
            else:
                delay_s = self._router.cluster.rng.uniform(0.0, 0.7)
                self._router.cluster.loop.call_later(delay_s, self._settle, EngineUnavailable("the replica is gone"))

    def arrive(self) -> None:
        if self._replica.up and not self._cancelled:
            self._task = asyncio.ensure_future(self._replica.run_requests(self._requests))
            self._replica.calls[self._task] = None
            self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._replica.calls.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServingError):
            self._router.cluster.loop.fail(error)
        if self._replica.up and not task.cancelled():
            router = self._router
            router.cluster.network.send(self._replica.node, router.node, f"answer {router.name}", self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if not self._answer.done():
            if error is None:
                self._answer.set_result(None)
            else:
                self._answer.set_exception(error)


class PromptPool:
    """As ServeRemotePool."""

    def __init__(self, router: Router):
        self.routing, self.router, self._prompts = RoutingStats(), router, PromptDigester(4)

    async def prefill(self, remote_request: RemoteRequest, avoid: list[str]) -> None:
        prompt = self._prompts.digest(
            remote_request.handoff_id,
            remote_request.token_ids,
            remote_request.cache_salt,
            images=images_in(remote_request),
            adapter=digest_of(remote_request.record(ModelAdapter)),
        )
        context = RoutingContext(prompt, self.routing, avoid=avoid, role=self.router.role)
        await self.router.call([EncodedRequest.of(remote_request)], context)

    async def statuses(self) -> list[ReplicaStatus]:
        return await self.router.deployment.statuses(self.router.node)

    async def state(self) -> PoolState:
        return self.router.deployment.state()
