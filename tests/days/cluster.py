"""A simulated cluster: the real ingress, control side, router and engines, on modelled nodes, links and Serve."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from deployments.frontend.admission import Admission, AdmissionLimits
from deployments.frontend.availability import Availability
from deployments.frontend.inboxes import Inboxes
from deployments.frontend.sequence import SequenceContext
from deployments.observability.stats import IngressStats, ModelStats
from deployments.observability.timeline import RequestTimelines
from deployments.replicas.departure import depart
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.rebalancing import rebalance
from deployments.replicas.remote_dispatcher import PoolState
from deployments.routing.balancer import Balancer
from deployments.routing.config import Role, RoutingConfig
from deployments.routing.prompt_digest import PromptDigest, PromptDigester
from deployments.routing.routing_context import CallOutcome, RoutingContext
from deployments.routing.stats import RoutingStats
from deployments.routing.subscriptions import Subscriptions
from engine.config import EngineConfig, HandoffConfig
from engine.core.server import POLL_MS
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.wire.messages import EngineUpdate, GenerateRequest, Notice, PeerPool, TokenBatch
from engine.wire.remote_request import RemoteRequest
from tests.days.engine import Engine, Report
from tests.days.loop import VirtualLoop
from tests.days.model import TOKENIZER
from tests.days.network import Network

STATUS_TIMEOUT_S = 3.0  # of ServePool
EXIT_S = 0.2  # of EngineDeployment
DRAIN_S = 20.0
BATCH, UPDATE = msgspec.msgpack.Decoder(TokenBatch), msgspec.msgpack.Decoder(EngineUpdate)
NOTICE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Notice)


@dataclass(frozen=True)
class Size:
    """What a cluster is made of."""

    ingresses: int = 2
    decode: int = 2
    prefill: int = 1
    num_blocks: int = 40
    max_model_len: int = 96
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 24
    overlap: bool = True
    policy: str = "always"
    fetches: bool = True
    drift: float = 0.0
    routing: str = "prefix_aware"
    max_waiting: int = 64
    step_s: float = 0.004
    lease_s: float = 10.0
    roles: bool = False
    """Whether the engines for prefill are in the deployment of the others, and all can change their roles."""
    stages: int = 1
    drafts: bool = False
    block_s: float = 0.002
    """To read a block of another engine."""
    stalls: float = 0.01
    """Share of the blocks whose read stalls, for almost as long as a read may."""

    def config(self, role: Role) -> EngineConfig:
        return EngineConfig(
            block_size=4,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            handoff=HandoffConfig(
                role=role if self.prefill else "replica",
                switch_roles=self.roles,
                policy=self.policy,  # type: ignore[arg-type]
                enable_prefix_fetching=self.fetches,
                lease_s=self.lease_s,
                heartbeat_s=self.lease_s / 10,
                progress_s=self.lease_s / 2,
                accept_s=max(1.0, self.lease_s / 2),  # an engine accepts between two steps
                fetch_timeout_s=self.lease_s / 2,
            ),
        )


class Cluster:
    def __init__(self, loop: VirtualLoop, rng: random.Random, size: Size):
        self.loop, self.rng, self.size = loop, rng, size
        self.poll_s = POLL_MS / 1000  #: longest wait of an engine's step loop
        self.network = Network(loop, random.Random(rng.getrandbits(64)))
        self.seen = self.network.seen
        self.log: list[str] = []
        self.digest = 0  #: of all messages, with their times
        self.only_losses = False  #: whether messages are lost, but so few that nobody may notice
        self.named_kv: dict[bytes, list[int]] = {}  #: KV of the blocks in prefix caches, by the blocks' names
        self.addresses: dict[str, tuple[str, Callable[[bytes], Any]]] = {}  # -> node and what takes a message there
        self.engines: dict[str, Engine] = {}
        self.deployments = {"decode": Deployment(self, "decode", size.decode + size.prefill * size.roles)}
        if size.prefill and not size.roles:
            self.deployments["prefill"] = Deployment(self, "prefill", size.prefill)
        self.ingresses = [Ingress(self, f"i{i}") for i in range(size.ingresses)]

    def start(self) -> None:
        for deployment in reversed(self.deployments.values()):
            deployment.start()
        if self.size.roles:
            self.deployments["decode"].replicas[0].switch_role()

    def note(self, what: str) -> None:
        self.log.append(f"{self.loop.time():9.4f} {what}")

    def engine_of_epoch(self, epoch: int) -> Engine | None:
        return next((e for e in self.engines.values() if e.alive and e.channel.peer.epoch == epoch), None)

    def send(self, node: str, kind: str, address: str, message: bytes) -> None:
        """A message over a connection between two processes. kind: name of the sender."""
        self.digest = zlib.crc32(message, zlib.crc32(f"{self.loop.time()} {address}".encode(), self.digest))
        if address in self.addresses:
            target, take = self.addresses[address]
            self.network.send(node, target, f"{kind} {address}", take, message)

    def send_envelope(self, node: str, address: str, data: bytes) -> None:
        engine = self.engines.get(address.removeprefix("channel:"))
        if engine is not None:
            self.network.datagram(node, engine.node, engine.channel.receive, data)

    def engine_ended(self, engine: Engine, reason: str) -> None:
        engine.die()
        for deployment in self.deployments.values():
            deployment.engine_died(engine, reason)


class Replica(EngineControl):
    """A replica: the control side of an engine, in a process of its own."""

    def __init__(self, deployment: Deployment, number: int):
        self.cluster, self.deployment = deployment.cluster, deployment
        cluster, size = deployment.cluster, deployment.cluster.size
        self.engine_id = f"{deployment.role[0]}{number}"
        self.node, self.up, self.stopping = f"n-{self.engine_id}", True, False
        peers: dict[PeerPool, RemotePool] = {}
        if deployment.role == "decode" and size.prefill:
            pool = deployment if size.roles else cluster.deployments["prefill"]
            peers["prefill"] = RemotePool(Router(pool, self.node, f"{self.engine_id}>p", "prefill"))
        super().__init__(10.0, peers, self.node)
        self.calls: set[asyncio.Task[Any]] = set()
        self.status_to = f"control:{self.engine_id}"
        cluster.addresses[self.status_to] = self.node, lambda data: self.up and self.handle(NOTICE.decode(data))
        self.engine = cluster.engines[self.engine_id] = Engine(
            cluster,
            self.engine_id,
            self.node,
            size.config(deployment.role),
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            overlap=size.overlap,
            drift=1.0 + cluster.rng.uniform(-1, 1) * size.drift,
            status_to=self.status_to,
        )
        cluster.addresses[self.engine.address] = self.node, self.engine.take
        self.start()
        self.tasks = [asyncio.ensure_future(self._exit_with_engine())]
        if deployment.role == "decode":
            self.tasks.append(
                asyncio.ensure_future(rebalance(self, self.deployment.statuses_of_pool, size.max_num_seqs))
            )

    def send(self, command: bytes) -> None:
        if self.up:
            self.cluster.send(self.node, self.status_to, self.engine.address, command)

    async def _exit_with_engine(self) -> None:
        reason = await self.until_unhealthy()
        self.cluster.seen["an engine hangs"] += 1
        self.exit(reason)

    def exit(self, reason: str) -> None:
        """As EngineDeployment does when its engine has ended."""
        if self.up:
            self.fail(reason)
            self.cluster.loop.call_later(EXIT_S, self.die)

    def switch_role(self) -> None:
        """As RoleFollower does."""
        self.set_role("prefill" if self.engine.core.scheduler.handoffs.role == "decode" else "decode")

    async def depart(self) -> None:
        """Stop in an orderly way."""
        self.stopping = True
        self.deployment.changed()
        await depart(self, self.deployment.statuses_of_pool, self.cluster.size.max_num_seqs)
        deadline = self.cluster.loop.time() + DRAIN_S
        while self.calls and self.cluster.loop.time() < deadline:
            await asyncio.sleep(0.2)
        self.die()

    def die(self, engine_lives_s: float = 0.0) -> None:
        """End the process at once. engine_lives_s: seconds for which its engine goes on."""
        if not self.up:
            return
        self.up = False
        self.cluster.note(f"replica {self.engine_id} is gone")
        for call in [*self.tasks, *self.calls]:
            call.cancel()
        self.close()
        for dispatcher in self._dispatchers.values():
            dispatcher.pool.router.close()  # type: ignore[attr-defined]
        self.cluster.loop.call_later(engine_lives_s, self.engine.die)
        self.deployment.lost(self)


class Deployment:
    """Serve's part: keeps up a number of replicas, and tells routers of them."""

    def __init__(self, cluster: Cluster, role: Role, num_replicas: int):
        self.cluster, self.role, self.num_replicas = cluster, role, num_replicas
        self.replicas: list[Replica] = []
        self.routers: list[Router] = []
        self._count = self._starting = 0

    def start(self) -> None:
        for _ in range(self.num_replicas):
            self._start_one()

    def _start_one(self) -> None:
        replica = Replica(self, self._count)
        self._count += 1
        self.replicas.append(replica)
        self.cluster.note(f"replica {replica.engine_id} is up")
        self.changed()

    def lost(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self._starting += 1
        self.cluster.loop.call_later(self.cluster.rng.uniform(1.0, 4.0), self._replace)
        self.cluster.loop.call_later(self.cluster.rng.uniform(0.05, 1.0), self.changed)

    def _replace(self) -> None:
        self._starting -= 1
        self._start_one()

    def engine_died(self, engine: Engine, reason: str) -> None:
        for replica in self.replicas:
            if replica.engine is engine:
                self.cluster.loop.call_later(self.cluster.rng.uniform(0.01, 1.0), replica.exit, reason)

    def changed(self) -> None:
        """Tell all routers, each at its time, which replicas there are."""
        there = [replica for replica in self.replicas if not replica.stopping]
        for router in self.routers:
            self.cluster.network.send("controller", router.node, f"replicas {router.name}", router.update, there)

    def state(self) -> PoolState:
        return "deploying" if self._starting else "up" if self.replicas else "down"

    async def statuses(self, node: str) -> list[ReplicaStatus]:
        """Ask all replicas."""
        loop, network = self.cluster.loop, self.cluster.network

        async def ask(replica: Replica) -> ReplicaStatus | None:
            await asyncio.sleep(max(0.0, network.healed_at(node, replica.node) - loop.time()) + network.delay())
            if not replica.up:
                return None
            try:
                status = msgspec.msgpack.encode(replica.status())
            except EngineUnavailable:
                return None
            await asyncio.sleep(network.delay())
            return msgspec.msgpack.decode(status, type=ReplicaStatus)

        async def limited(replica: Replica) -> ReplicaStatus | None:
            try:
                return await asyncio.wait_for(ask(replica), STATUS_TIMEOUT_S)
            except TimeoutError:
                return None

        found = await asyncio.gather(*map(limited, list(self.replicas)))
        return [status for status in found if status is not None]

    async def statuses_of_pool(self) -> list[ReplicaStatus]:
        return await self.statuses("controller")


class Router(Subscriptions):
    """A handle's router, as EngineRouter and Serve are together."""

    def __init__(self, deployment: Deployment, node: str, name: str, role: Role):
        """role: of the calls."""
        super().__init__(self._apply)
        self.deployment, self.cluster = deployment, deployment.cluster
        cluster, self.node, self.name, self.role = deployment.cluster, node, name, role
        self.address = f"router:{name}"
        self.open = True
        self.replicas: dict[str, Replica] = {}
        self.balancer = Balancer(
            RoutingConfig(policy=cluster.size.routing),  # type: ignore[arg-type]
            role,
            4,
            random.Random(cluster.rng.getrandbits(64)),
        )
        cluster.addresses[self.address] = node, self._take
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
        while not self.replicas:
            await asyncio.sleep(0.05)
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
            network.send(self.node, replica.node, f"call {self.name}", call.cancel)
            raise
        except EngineUnavailable:
            if not replica.up and self.open:  # Serve's router notices a dead actor when its call fails
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
            self._replica.calls.add(self._task)
            self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._replica.calls.discard(task)
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


class RemotePool:
    """As ServeRemotePool."""

    def __init__(self, router: Router):
        self.routing, self.router, self._prompts = RoutingStats(), router, PromptDigester(4)

    async def prefill(self, remote_request: RemoteRequest, avoid: list[str]) -> None:
        prompt = self._prompts.digest(remote_request.handoff_id, remote_request.token_ids, remote_request.cache_salt)
        context = RoutingContext(prompt, self.routing, avoid=avoid, role="prefill")
        await self.router.call([EncodedRequest.of(remote_request)], context)

    async def statuses(self) -> list[ReplicaStatus]:
        return await self.router.deployment.statuses(self.router.node)

    async def state(self) -> PoolState:
        return self.router.deployment.state()


class Pool:
    """As ServePool."""

    def __init__(self, router: Router):
        self.routing, self.router, self._prompts = RoutingStats(), router, PromptDigester(4)

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        first = requests[0]
        prompt: PromptDigest = self._prompts.digest(first.request_id, first.prompt, first.cache_salt, first.session_id)
        context = RoutingContext(prompt, self.routing, avoid, first.model)
        await self.router.call([EncodedRequest.of(request) for request in requests], context)

    async def statuses(self) -> list[ReplicaStatus]:
        found = await self.router.deployment.statuses(self.router.node)
        if not found:
            raise EngineUnavailable("no replica is up and healthy")
        return found

    async def asleep(self) -> bool:
        return False

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}


class TokenInboxes(Inboxes):
    def __init__(self, cluster: Cluster, node: str, stats: IngressStats):
        super().__init__(stats)
        self._cluster, self._node = cluster, node
        self.address = f"tokens:{node}"
        cluster.addresses[self.address] = node, lambda data: self.dispatch(BATCH.decode(data))

    def send(self, address: str, message: bytes) -> None:
        self._cluster.send(self._node, self.address, address, message)


class Ingress:
    def __init__(self, cluster: Cluster, node: str):
        self.node, size = node, cluster.size
        self.stats, self.ingress_stats = ModelStats(), IngressStats(node)
        self.inboxes = TokenInboxes(cluster, node, self.ingress_stats)
        self.router = Router(cluster.deployments["decode"], node, f"{node}>d", "decode")
        limits = AdmissionLimits(
            max_num_seqs=size.max_num_seqs,
            num_engines=size.decode,
            num_ingresses=size.ingresses,
            max_waiting=size.max_waiting,
            max_waiting_tokens=10_000,
        )
        pool: Any = Pool(self.router)
        self.admission = Admission(pool, limits, self.stats, Availability("m"))
        self.context = SequenceContext(
            model="m",
            tokenizer=TOKENIZER,
            channel=self.inboxes,
            pool=pool,
            admission=self.admission,
            stats=self.stats,
            timelines=RequestTimelines(node),
            max_replays=3,
        )


__all__ = ["Cluster", "Counter", "Overloaded", "Size"]
