"""A simulated cluster: the real ingress, control side, router and engines, on modelled nodes, links and Serve."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from deployments.replicas.departure import depart
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.rebalancing import rebalance
from deployments.replicas.remote_dispatcher import PoolState, RemotePool
from deployments.replicas.role_follower import RoleFollower
from deployments.routing.config import Role
from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoffs import Handoffs
from engine.wire.messages import Notice, kinds_of
from engine.wire.stats.handoff_stats import PeerPool
from tests.days.encoders import Images, engine_class
from tests.days.engine import Channel, Engine
from tests.days.holds import Held, move_holds
from tests.days.ingress import Ingress, Pool
from tests.days.keys import Computation
from tests.days.loop import VirtualLoop
from tests.days.network import Network
from tests.days.router import PromptPool, Router
from tests.days.stills import Process, StillLoop, in_process
from tests.days.store import Redis

STATUS_TIMEOUT_S = 3.0  # of ServePool
EXIT_S = 0.2  # of EngineDeployment
DRAIN_S = 20.0
NOTICE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds_of(Notice))


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
    host: int = 0
    """Blocks of host memory below the KV cache of each engine."""
    disk: int = 0
    """The same on its disk."""
    tier_ttl_s: float | None = None
    images: Images | None = None
    adapters: int = 0
    """Slots for adapters of each engine."""
    held: Held | None = None
    checks: int = 0
    """One in so many tokens is computed to check KV; 0 for none."""

    @cache  # noqa: B019 - sizes are few, and small
    def config(self, role: Role) -> EngineConfig:
        handoff = HandoffConfig(
            role=role if self.prefill or role == "encode" else "replica",
            switch_roles=self.roles and role != "encode",
            policy=self.policy,  # type: ignore[arg-type]
            enable_prefix_fetching=self.fetches,
            lease_s=self.lease_s,
            heartbeat_s=self.lease_s / 10,
            progress_s=self.lease_s / 2,
            accept_s=max(1.0, self.lease_s / 2),  # an engine accepts between two steps
            fetch_timeout_s=self.lease_s / 2,
        )
        return EngineConfig(
            block_size=4,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            handoff=handoff,
            encode=replace(handoff, role="decode") if self.encoders and role != "encode" else None,
        )

    @property
    def encoders(self) -> int:
        return 0 if self.images is None else self.images.encoders


class Cluster:
    def __init__(self, loop: VirtualLoop, rng: random.Random, size: Size):
        self.loop, self.rng, self.size = loop, rng, size
        self.network = Network(loop, random.Random(rng.getrandbits(64)))
        self.seen = self.network.seen
        self.log: list[str] = []
        self.digest = 0  #: of all messages, with their times
        self.flipped = False  #: whether the bytes of a tier have flipped
        self.only_losses = False  #: whether messages are lost, but so few that nobody may notice
        self.named_kv: dict[bytes, list[int]] = {}  #: KV of the blocks in prefix caches, by the blocks' names
        self.named_embeddings: dict[bytes, list[int]] = {}  #: the same of encode engines
        self.channels: dict[str, Channel] = {}  #: by address
        self.addresses: dict[str, tuple[str, Callable[[bytes], Any]]] = {}  # -> node and what takes a message there
        self.engines: dict[str, Engine] = {}
        self.deployments = {"decode": Deployment(self, "decode", size.decode + size.prefill * size.roles)}
        if size.prefill and not size.roles:
            self.deployments["prefill"] = Deployment(self, "prefill", size.prefill)
        if size.encoders:
            self.deployments["encode"] = Deployment(self, "encode", size.encoders)
        self.is_autoscaled = False
        self.roles: dict[str, Role] = {}  #: that the autoscaler has given, by engine
        self.redis = Redis(self)
        self.has_lost_ingress = False
        self.store_fails = False  #: whether it has been away
        self.computations: list[Computation] = []  #: of answers with an idempotency key
        self.stands_still = False  #: whether an ingress has stood still
        self.disk_full_until = 0.0  #: of the folder of batches
        self.on_new_ingress: list[Callable[[Ingress], None]] = []
        self.ingresses = [self._new_ingress(f"i{i}") for i in range(size.ingresses)]

    @property
    def num_calls(self) -> int:
        """Number of calls that engines' replicas work on."""
        return sum(len(replica.calls) for each in self.deployments.values() for replica in each.replicas)

    def start(self) -> None:
        for deployment in reversed(self.deployments.values()):
            deployment.start()
        if self.size.roles:
            self.deployments["decode"].replicas[0].switch_role()

    async def an_ingress(self, number: int) -> Ingress:
        """Return the ingress with this number, or another one if it is not up, as a proxy does."""
        while not (up := [ingress for ingress in self.ingresses if ingress.up]):
            await asyncio.sleep(0.05)
        ingress = self.ingresses[number % len(self.ingresses)]
        return ingress if ingress.up else up[number % len(up)]

    def kill_ingress(self, ingress: Ingress) -> None:
        """End the process of an ingress, and start another one some time later."""
        if ingress.up:
            self.has_lost_ingress = True
            ingress.die()
            number = self.ingresses.index(ingress)

            def replace() -> None:
                self.ingresses[number] = new = self._new_ingress(f"{ingress.node}'")
                for call in self.on_new_ingress:
                    call(new)

            self.loop.call_later(self.rng.uniform(1.0, 4.0), replace)

    def _new_ingress(self, node: str) -> Ingress:
        process = Process(self.loop) if isinstance(self.loop, StillLoop) else None
        found: Ingress = in_process(process, Ingress, self, node, process)
        return found

    def stop_ingress(self, ingress: Ingress, seconds: float) -> None:
        """Let an ingress stand still."""
        if ingress.up and ingress.process is not None and not ingress.process.still:
            self.stands_still = True
            ingress.process.stop()
            self.loop.call_later(seconds, ingress.go_on)

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
        channel = self.channels.get(address)
        if channel is not None:
            self.network.datagram(node, channel.node, channel.receive, data)

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
        self.moving_to: Router | None = None
        peers: dict[PeerPool, RemotePool] = {}
        if deployment.role == "decode" and size.prefill:
            pool = deployment if size.roles else cluster.deployments["prefill"]
            peers["prefill"] = PromptPool(Router(pool, self.node, f"{self.engine_id}>p", "prefill"))
        if deployment.role != "encode" and size.encoders:
            pool = cluster.deployments["encode"]
            peers["encode"] = PromptPool(Router(pool, self.node, f"{self.engine_id}>e", "encode"))
        super().__init__(10.0, peers, self.node)
        self.calls: dict[asyncio.Task[Any], None] = {}  # in order, since a seed is a day
        self.status_to = f"control:{self.engine_id}"
        cluster.addresses[self.status_to] = self.node, lambda data: self.up and self.handle(NOTICE.decode(data))
        self.engine = cluster.engines[self.engine_id] = engine_class(size.images, deployment.role)(
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
            if size.roles and cluster.is_autoscaled:
                self.tasks.append(asyncio.ensure_future(RoleFollower(self, self._role, self._leave).run()))

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

    async def _role(self) -> Role | None:
        return self.cluster.roles.get(self.engine_id)

    async def _leave(self, goes_on: Callable[[], bool]) -> None:
        statuses = self.deployment.statuses_of_pool
        leaving = [depart(self, statuses, self.cluster.size.max_num_seqs, goes_on)]
        if self.cluster.size.held:
            self.moving_to = self.moving_to or Router(self.deployment, self.node, f"{self.engine_id}>m", "decode")
            leaving.append(move_holds(self, self.node, statuses, Pool(self.moving_to).generate))
        await asyncio.gather(*leaving)
        self.forget_others()

    def forget_others(self) -> None:
        """Close the router to which holds move."""
        if self.moving_to is not None:
            self.moving_to.close()
            self.moving_to = None

    def switch_role(self) -> None:
        """As RoleFollower does."""
        self.set_role("prefill" if self.engine.core.scheduler.parts[Handoffs].role == "decode" else "decode")

    async def depart(self) -> None:
        """Stop in an orderly way."""
        self.stopping = True
        self.deployment.changed()
        await self._leave(lambda: True)
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
        self.forget_others()
        for dispatcher in self._dispatchers.values():
            dispatcher.pool.router.close()  # type: ignore[attr-defined]
        self.cluster.loop.call_later(engine_lives_s, self.engine.die)
        self.deployment.lost(self)


class Question:
    """Asks replicas for their status. They answer with what they know then, if they are up and healthy."""

    def __init__(self, cluster: Cluster, node: str, replicas: list[Replica]):
        self._loop, self._network = cluster.loop, cluster.network
        self.answered: asyncio.Future[list[ReplicaStatus]] = cluster.loop.create_future()
        self._found: dict[Replica, ReplicaStatus | None] = {}
        self._asked = list(replicas)
        for replica in self._asked:
            healed_s = max(0.0, self._network.healed_at(node, replica.node) - self._loop.time())
            self._loop.call_later(healed_s + self._network.delay(), self._arrive, replica)
        self._loop.call_later(STATUS_TIMEOUT_S if self._asked else 0.0, self._end)

    def _arrive(self, replica: Replica) -> None:
        with suppress(EngineUnavailable):
            if replica.up:
                self._loop.call_later(self._network.delay(), self._settle, replica, replica.status())
                return
        self._settle(replica, None)

    def _settle(self, replica: Replica, status: ReplicaStatus | None) -> None:
        self._found[replica] = status
        if len(self._found) == len(self._asked):
            self._end()

    def _end(self) -> None:
        if not self.answered.done():
            found = [self._found.get(replica) for replica in self._asked]
            self.answered.set_result([status for status in found if status is not None])


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

    def scale(self, num_replicas: int) -> None:
        """Start replicas, or let some of them depart."""
        self.num_replicas = num_replicas
        self._start_missing()
        for replica in [replica for replica in self.replicas if not replica.stopping][num_replicas:]:
            replica.stopping = True
            replica.tasks.append(asyncio.ensure_future(replica.depart()))

    def _start_missing(self) -> None:
        there = sum(not replica.stopping for replica in self.replicas) + self._starting
        for _ in range(self.num_replicas - there):
            self._starting += 1
            self.cluster.loop.call_later(self.cluster.rng.uniform(1.0, 4.0), self._replace)

    def _start_one(self) -> None:
        replica = Replica(self, self._count)
        self._count += 1
        self.replicas.append(replica)
        self.cluster.note(f"replica {replica.engine_id} is up")
        self.changed()

    def lost(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self._start_missing()
        self.cluster.loop.call_later(self.cluster.rng.uniform(0.05, 1.0), self.changed)

    def _replace(self) -> None:
        self._starting -= 1
        if sum(not replica.stopping for replica in self.replicas) < self.num_replicas:
            self._start_one()

    def engine_died(self, engine: Engine, reason: str) -> None:
        for replica in self.replicas:
            if replica.engine is engine:
                self.cluster.loop.call_later(self.cluster.rng.uniform(0.01, 1.0), replica.exit, reason)

    def changed(self) -> None:
        """Tell all routers, each at its time, which replicas there are."""
        there = [replica for replica in self.replicas if not replica.stopping]
        for router in self.routers:
            self.cluster.network.send("controller", router.node, f"replicas {router.name}", router.told, there)

    def state(self) -> PoolState:
        return "deploying" if self._starting else "up" if self.replicas else "down"

    async def statuses(self, node: str) -> list[ReplicaStatus]:
        """Ask all replicas."""
        question = Question(self.cluster, node, self.replicas)
        return await question.answered

    async def statuses_of_pool(self) -> list[ReplicaStatus]:
        return await self.statuses("controller")
