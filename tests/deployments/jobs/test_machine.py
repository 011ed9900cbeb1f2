"""Clients, ingresses that die or stand still, leases and a clock: each client has each token once, and nothing is
computed twice as long as somebody computes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.billing.prices import FREE
from deployments.jobs import job as job_module
from deployments.jobs.errors import IdempotencyKeyInUse
from deployments.jobs.event_ids import Position, parse_event_id
from deployments.jobs.jobs import Jobs
from deployments.jobs.lease import LEASE_S, RENEW_S
from deployments.jobs.record import JobRecord, job_id_of
from deployments.jobs.source import JobSource
from deployments.storage import memory
from deployments.storage.memory import MemoryStore
from engine.errors import ServingError
from engine.text.text_stream import TextChunk
from engine.wire.generate_request import GenerateRequest
from engine.wire.token_delta import TokenDelta
from tests.examples import examples

NUM_TOKENS = 6
KEYS = ("a", "b")
TICK_S = RENEW_S / 2
TURNS = 20  # of the event loop, more than anything takes that nobody holds up


class Clock(asyncio.SelectorEventLoop):
    """An event loop in which time passes only when it is told to."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Ingress:
    """One process. The store is its own view of the shared one, which ends when it dies and waits while it stands."""

    shared = True

    def __init__(self, store: MemoryStore):
        self.jobs = Jobs(cast(Any, self), 1e9)
        self.frontend = SimpleNamespace(
            ingress=self,
            tokenizer=SimpleNamespace(token_bytes=lambda i: bytes([i]), is_special=lambda i: False),
            prices=FREE,
        )
        self.dead, self.moves = False, asyncio.Event()
        self.moves.set()
        self.computing: dict[int, Computation] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self._store = store
        self.unsealed = store.unsealed

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            await self.moves.wait()
            if self.dead:
                await asyncio.Event().wait()
            return await getattr(self._store, name)(*args)

        return call

    async def close(self) -> None: ...


class Computation:
    """In place of a LiveGeneration: its tokens are made of the seed, and come when the machine says so."""

    log: ClassVar[list[Computation]] = []

    def __init__(
        self, frontend: Any, prompts: list[list[GenerateRequest]], client: str, observers: Any, *, resumes: bool
    ):
        self.ingress, self.key, self.seed = frontend.ingress, client, prompts[0][0].params.seed or 0
        self.running, self._steps = False, asyncio.Queue[int]()
        (self._observer,) = (observe(SimpleNamespace(index=0)) for observe in observers)
        Computation.log.append(self)

    def step(self, size: int) -> None:
        self._steps.put_nowait(size)

    async def chunks(self) -> AsyncGenerator[TextChunk]:
        self.running, position = True, 0
        self.ingress.computing[id(self)] = self
        try:
            while position < NUM_TOKENS:
                size = min(await self._steps.get(), NUM_TOKENS - position)
                tokens = [65 + (self.seed + position + i) % 26 for i in range(size)]
                reason = "length" if position + size == NUM_TOKENS else None
                delta = TokenDelta(request_id="", position=position, token_ids=tokens, finish_reason=cast(Any, reason))
                self._observer.received(delta)
                position += size
                yield TextChunk("", tokens, [], None, None)
        finally:
            self.running = False
            self.ingress.computing.pop(id(self), None)


@dataclass(eq=False)
class Client:
    key: str
    tokens: list[str] = field(default_factory=list)
    known: Position | None = None
    done: bool = False
    ingress: Ingress | None = None
    task: asyncio.Task[None] | None = None

    async def ask(self, ingress: Ingress) -> None:
        stream_id = job_id_of("", self.key)
        try:
            job = await ingress.jobs.open(stream_id, "", JobRecord.new("", "/", b"", {}))
            source = JobSource(job, self.known)
            prompts = [[GenerateRequest(request_id="", prompt=[1])]]
            generation = await source.start(cast(Any, ingress.frontend), prompts, self.key, "fp")
            async for chunk in generation.chunks():
                await ingress.moves.wait()
                if (line := source.event_ids.next()) is not None:
                    self.tokens.append(chunk.text)
                    _, self.known = parse_event_id(line.decode()[4:-1])
            self.done = True
        except (ServingError, IdempotencyKeyInUse):
            self.ingress = None


class IdempotencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = Clock()
        asyncio.set_event_loop(self.loop)
        Computation.log = []
        self.patches = [
            mock.patch.object(job_module, "LiveGeneration", Computation),
            mock.patch.object(memory, "time", SimpleNamespace(monotonic=self.loop.time)),
        ]
        for patch in self.patches:
            patch.start()
        self.store = MemoryStore(2**20)
        self.ingresses = [Ingress(self.store) for _ in range(2)]
        self.clients: list[Client] = []
        self.lost = dict.fromkeys(KEYS, 0)  # computations whose ingress has died or stood still

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    @rule(key=st.sampled_from(KEYS), at=st.integers(0, 1))
    def a_client_comes(self, key: str, at: int) -> None:
        self.clients.append(Client(key))
        self._connect(self.clients[-1], at)

    def _connect(self, client: Client, at: int) -> None:
        client.ingress = self.ingresses[at]
        client.task = self.loop.create_task(client.ask(client.ingress))
        self.turn()

    @rule(at=st.integers(0, 1), data=st.data())
    @precondition(lambda self: any(not client.done for client in self.clients))
    def a_client_connects_again(self, at: int, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([client for client in self.clients if not client.done]))
        self._leave(client)
        self._connect(client, at)

    def _leave(self, client: Client) -> None:
        if client.task is not None:
            client.task.cancel()
        client.ingress = None
        self.turn()

    @rule(size=st.integers(1, 3))
    def engines_step(self, size: int) -> None:
        for computation in self._computing():
            if computation.ingress.moves.is_set():
                computation.step(size)
        self.turn()

    @rule(at=st.integers(0, 1))
    def an_ingress_dies(self, at: int) -> None:
        ingress = self.ingresses[at]
        self._count_lost(ingress)
        ingress.dead = True
        for client in self.clients:
            if client.ingress is ingress:
                self._leave(client)
        for job in list(ingress.jobs._live.values()):
            if job._task is not None:
                job._task.cancel()
        ingress.computing.clear()
        self.ingresses[at] = Ingress(self.store)
        self.turn()

    @rule(at=st.integers(0, 1))
    def an_ingress_stands_still(self, at: int) -> None:
        if self.ingresses[at].moves.is_set():
            self._count_lost(self.ingresses[at])
            self.ingresses[at].moves.clear()

    @rule(at=st.integers(0, 1))
    def an_ingress_moves_again(self, at: int) -> None:
        self.ingresses[at].moves.set()
        self.pass_time(RENEW_S)

    def _count_lost(self, ingress: Ingress) -> None:
        for computation in ingress.computing.values():
            self.lost[computation.key] += 1

    @rule(seconds=st.sampled_from([TICK_S, RENEW_S, LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.loop.now += TICK_S
            self.turn()

    def _computing(self) -> list[Computation]:
        return [computation for ingress in self.ingresses for computation in list(ingress.computing.values())]

    @invariant()
    def only_one_ingress_that_moves_computes_a_key(self) -> None:
        for key in KEYS:
            moving = [c for c in self._computing() if c.key == key and c.ingress.moves.is_set()]
            assert len(moving) <= 1, key

    @invariant()
    def nothing_is_computed_again_that_was_not_lost(self) -> None:
        for key in KEYS:
            assert sum(computation.key == key for computation in Computation.log) <= 1 + self.lost[key], key

    @invariant()
    def no_client_has_a_token_twice(self) -> None:
        for client in self.clients:
            seeds = [computation.seed for computation in Computation.log if computation.key == client.key]
            assert len(set(seeds)) <= 1
            text = "".join(client.tokens)
            assert text == "".join(chr(65 + (seeds[0] + i) % 26) for i in range(len(text))) if text else True
            assert not client.done or len(text) == NUM_TOKENS

    def teardown(self) -> None:
        try:
            for ingress in self.ingresses:
                ingress.moves.set()
            self.pass_time(RENEW_S)
            for _ in range(4 * NUM_TOKENS):
                for client in self.clients:
                    if not client.done and client.ingress is None:
                        self._connect(client, 0)
                self.engines_step(1)
                if not self._computing():
                    self.pass_time(LEASE_S + RENEW_S)
                if all(client.done for client in self.clients):
                    break
            assert all(client.done for client in self.clients)
            self.no_client_has_a_token_twice()
            self.nothing_is_computed_again_that_was_not_lost()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.turn()
            for patch in self.patches:
                patch.stop()
            asyncio.set_event_loop(None)
            self.loop.close()


TestIdempotencyMachine = IdempotencyMachine.TestCase
TestIdempotencyMachine.settings = settings(max_examples=examples(60), stateful_step_count=20)
