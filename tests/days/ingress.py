"""Ingresses of a simulated cluster: admission, inboxes, retries and jobs. They can die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.frontend.admission import Admission, AdmissionLimits
from deployments.frontend.availability import Availability
from deployments.frontend.inboxes import Inboxes
from deployments.frontend.sequence_context import SequenceContext
from deployments.jobs.jobs import Jobs
from deployments.observability.stats import IngressStats, ModelStats
from deployments.observability.timeline import RequestTimelines
from deployments.poison.poison import Poison
from deployments.poison.sequence_trial import SequenceTrial
from deployments.quotas.key_quota import observe_generation
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.pools import ReplicaStatus
from deployments.routing.prompt_digest import PromptDigest, PromptDigester
from deployments.routing.routing_context import RoutingContext
from deployments.routing.stats import RoutingStats
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter, digest_of
from engine.wire.parts.images import images_in
from engine.wire.stats.handoff_stats import PeerPool
from engine.wire.token_delta import TokenBatch
from tests.days.keys import TTL_S
from tests.days.model import TOKENIZER
from tests.days.router import Router
from tests.days.stills import Process, guarded, in_process
from tests.days.store import open_store

if TYPE_CHECKING:
    from tests.days.cluster import Cluster

BATCH = msgspec.msgpack.Decoder(TokenBatch)


class Pool:
    """As ServePool."""

    def __init__(self, router: Router):
        self.routing, self.router, self._prompts = RoutingStats(), router, PromptDigester(4)

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        first = requests[0]
        prompt: PromptDigest = self._prompts.digest(
            first.request_id,
            first.prompt,
            first.cache_salt,
            first.session_id,
            images_in(first),
            digest_of(first.record(ModelAdapter)),
        )
        context = RoutingContext(prompt, self.routing, avoid, first.model)
        await self.router.call([EncodedRequest.of(request) for request in requests], context)

    async def statuses(self) -> list[ReplicaStatus]:
        found = await self.router.deployment.statuses(self.router.node)
        if not found:
            raise EngineUnavailable("no replica is up and healthy")
        return found

    async def asleep(self) -> bool:
        deployment = self.router.deployment
        return not (deployment.num_replicas or deployment.replicas)

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}


class TokenInboxes(Inboxes):
    def __init__(self, ingress: Ingress, stats: IngressStats):
        super().__init__(stats)
        self.ingress, self.address = ingress, f"tokens:{ingress.node}"
        ingress.cluster.addresses[self.address] = ingress.node, guarded(lambda data: self.dispatch(BATCH.decode(data)))

    def send(self, address: str, message: bytes) -> None:
        if self.ingress.up:
            self.ingress.cluster.send(self.ingress.node, self.address, address, message)


class Ingress:
    """The process of one ingress."""

    def __init__(self, cluster: Cluster, node: str, process: Process | None):
        self.cluster, self.node, self.up, size = cluster, node, True, cluster.size
        self.process = process
        self.endings: list[Callable[[], None]] = []  #: called when the process dies
        self.tasks: dict[asyncio.Task[Any], None] = {}  #: handlers of requests, in order, since a seed is a day
        self.stats, self.ingress_stats = ModelStats(), IngressStats(node)
        self.inboxes = TokenInboxes(self, self.ingress_stats)
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
            observers=(partial(SequenceTrial, Poison()),),
            generation_observers=(observe_generation,),
        )
        self.jobs = Jobs(open_store(cluster, node, lambda: self.up), TTL_S)

    @property
    def is_behind(self) -> bool:
        """Whether it stands still, or has just gone on."""
        return self.process is not None and self.process.is_behind

    def go_on(self) -> None:
        if self.up and self.process is not None and self.process.still:
            self.process.go_on()

    def handle(self, answer: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to handle a request. The task is cancelled when this process dies."""
        task: asyncio.Task[None] = in_process(self.process, asyncio.ensure_future, answer)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    def die(self) -> None:
        """End the process at once. Its tasks are cancelled, but whatever they do then reaches nobody."""
        self.go_on()
        self.up = False
        self.cluster.note(f"ingress {self.node} is gone")
        del self.cluster.addresses[self.inboxes.address]
        self.router.close()
        for end in self.endings:
            end()
        for job in list(self.jobs._live.values()):
            job.cancel()
        for task in [*self.tasks, *filter(None, [self.admission._watch])]:
            task.cancel()
