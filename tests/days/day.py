"""A bad day: requests and faults from one seed, and what must hold on it."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from deployments.frontend.first_token import FirstTokenLate
from deployments.frontend.generation import TIMEOUT_GRACE_S, LiveGeneration
from deployments.frontend.retry import TokensLost
from deployments.jobs import job as job_module
from deployments.routing.prefix_index import block_keys
from engine.core.request import State
from engine.errors import EngineUnavailable, Overloaded, RequestTimeout, ServingError
from engine.wire import timeline
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.days.cluster import Cluster, Replica, Size
from tests.days.ingress import Ingress
from tests.days.keys import Computation, KeyedClient, check_jobs
from tests.days.loop import VirtualLoop
from tests.days.model import alone
from tests.days.tiers import check_content

FEW = 0.05  # share of datagrams that may be lost without anybody noticing, since each is repeated some five times
SETTLE_S = 20.0  # after the last request: longer than a lease
FORGET_S = 60.0  # more on every eighth day: what has ended is remembered for a minute
ABORTED_S = 0.1  # after its client has left, in which its engine hears of that on a day without late messages
ABORTED_STEPS = 4  # in which the request then ends
LIMIT_S = 200.0  # after the last request or fault, until all must have ended
# what goes wrong on one day: some days have one kind of trouble, and much of it
THEMES = (
    ("kill engine", "kill replica", "kill node", "pause", "cut", "lose tokens", "lose updates", "datagrams", "move",
     "drain", "reset cache"),
    ("pause",),
    ("pause", "pause", "reset cache", "kill node"),
    ("kill engine", "kill replica", "kill node", "lose tokens"),
    ("cut", "datagrams", "lose updates", "pause"),
    ("move", "move", "drain", "pause", "kill node"),
    ("move", "move", "move", "move", "reset cache"),
    ("freeze", "freeze", "pause", "datagrams"),
    ("lose updates", "lose updates", "slow answers", "slow answers", "freeze"),
    ("reset cache", "reset cache", "move", "freeze"),
    ("switch role", "switch role", "switch role", "move", "pause", "kill node"),
    ("kill ingress", "kill ingress", "kill engine", "move"),
    ("kill ingress", "store away", "store away", "kill node"),
    ("scale", "scale", "move", "kill node", "pause"),
    ("suspend",),
    ("suspend", "suspend", "move", "kill replica"),
)  # fmt: skip


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
WATCH_S = 0.1  # between two looks at the queues of the ingresses


@dataclass(frozen=True)
class Ask:
    """What a client asks for. leaves_after: seconds; None if it waits for the end. slow_s: between two looks. key: the
    idempotency key, with which it connects again after it has left."""

    at: float
    ingress: int
    client: str
    requests: tuple[GenerateRequest, ...]
    leaves_after: float | None = None
    slow_s: float = 0.0
    key: str = ""


@dataclass(frozen=True)
class Fault:
    """number: says which engine, or two of them. seconds: how long. moment: what the engine must be at."""

    at: float
    kind: str
    number: int
    other: int
    seconds: float
    moment: str = ""


@dataclass(frozen=True)
class Day:
    seed: int
    size: Size
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    loss: float = 0.0
    repeats: float = 0.0
    late_s: float = 1.0
    late: float = 0.01
    busy: float = 0.0

    @classmethod
    def of(cls, seed: int) -> Day:
        rng = random.Random(seed)
        mood, kinds = rng.random(), rng.choice(THEMES)
        size = Size(
            ingresses=rng.choice([1, 2, 2]),
            decode=rng.choice([1, 2, 2, 3]),
            prefill=rng.choice([0, 1, 1, 2]),
            num_blocks=rng.choice([24, 24, 28, 40, 96]),
            max_num_seqs=rng.choice([2, 4, 6]),
            max_num_batched_tokens=rng.choice([8, 24, 64]),
            overlap=rng.random() < 0.7,
            policy=rng.choice(["always", "always", "auto"]),
            fetches=rng.random() < 0.6,
            drift=rng.choice([0.0, 0.001, 0.2]),
            routing=rng.choice(["prefix_aware", "prefix_aware", "power_of_two", "round_robin"]),
            max_waiting=rng.choice([8, 64]),
            step_s=rng.choice([0.004, 0.02, 0.06]),
            stages=rng.choice([1, 1, 2, 3]),
            drafts=rng.random() < 0.4,
            lease_s=rng.choice([10.0, 1.0, 0.3]),
            block_s=rng.choice([0.0005, 0.004, 0.03]),
            stalls=rng.choice([0.01, 0.01, 0.2]),
            host=rng.choice([0, 0, 0, 6, 30]),
            disk=rng.choice([0, 0, 0, 20, 200]),
            tier_ttl_s=rng.choice([None, None, 3.0]),
        )
        if size.prefill and rng.random() < 0.2:
            size = replace(size, roles=True)
        if "suspend" in kinds:  # it matters while reads outlive leases
            lease_s = rng.choice([1.0, 0.3])
            size = replace(size, prefill=size.prefill or 1, policy="always", lease_s=lease_s, block_s=0.03, stalls=0.2)
        length_s = rng.choice([2.0, 6.0, 15.0])
        longest = rng.choice([40, 60])
        prefixes = [tuple(rng.randrange(1, 64) for _ in range(rng.randrange(0, longest))) for _ in range(3)]
        asks = tuple(_ask(rng, i, length_s, prefixes, size) for i in range(rng.choice([6, 15, 30])))
        if "kill ingress" in kinds:
            asks = tuple(other for ask in asks for other in _keyed(rng, ask))
        calm, lossy = mood < 0.15, 0.15 <= mood < 0.3
        if lossy:
            kinds = ("move", "move", "move", "reset cache", "switch role")
        count = 0 if calm else rng.choice([12, 24]) if lossy else rng.choice([2, 6, 12])
        faults = tuple(_fault(rng, asks, kinds, size) for _ in range(count))
        loss, repeats = rng.choice([0.0, 0.0, 0.02, 0.3]), rng.choice([0.0, 0.05, 0.3])
        if calm:
            return cls(seed, size, asks, (), 0.0, repeats, 0.01)
        busy = rng.choice([0.0, 0.0, 0.2])
        if lossy:
            return cls(seed, size, asks, faults, FEW, repeats, 0.01, busy=busy)
        late_s, late = rng.choice([0.01, 1.0]), rng.choice([0.01, 0.2])
        return cls(seed, size, asks, faults, loss, repeats, late_s, late, busy)

    @property
    def is_calm(self) -> bool:
        """Whether nothing is lost and nothing is late."""
        return not (self.faults or self.loss) and self.late_s < self.size.lease_s / 20

    @property
    def only_losses(self) -> bool:
        """Whether nothing is wrong but a few lost messages, all of which are sent again."""
        own_will = all(fault.kind in ("move", "reset cache", "switch role") for fault in self.faults)
        return own_will and 0 < self.loss <= FEW and self.late_s < self.size.lease_s / 20

    @property
    def last_at(self) -> float:
        return max([0.0, *(a.at for a in self.asks), *(f.at + f.seconds for f in self.faults)])


def _fault(rng: random.Random, asks: tuple[Ask, ...], kinds: tuple[str, ...], size: Size) -> Fault:
    kind = rng.choice(kinds)
    lease_s = rng.uniform(0.5, 3.0) * size.lease_s  # some faults just outlive a lease
    seconds = rng.choice([rng.uniform(0, 1), rng.uniform(0, 6), rng.uniform(0, 16), min(16.0, lease_s)])
    return Fault(
        rng.choice(asks).at + rng.uniform(0, 80 * size.step_s),
        kind,
        rng.randrange(100),
        rng.randrange(100),
        lease_s if kind == "suspend" else seconds,
        rng.choice(["", *MOMENTS.get(kind, ())]),
    )


def _ask(rng: random.Random, number: int, length_s: float, prefixes: list[tuple[int, ...]], size: Size) -> Ask:
    prompt = [rng.randrange(1, 64) for _ in range(rng.randrange(1, 16))]
    if rng.random() < 0.6:
        prompt = [*rng.choice(prefixes), *prompt]
    elif rng.random() < 0.6:
        prompt += [rng.randrange(1, 64) for _ in range(36)]
    timeout_s = rng.choice([None, 30.0, 30.0, 60.0, rng.uniform(0.05, 3.0)])
    params = SamplingParams(
        max_tokens=rng.choice([1, 3, 12, 30, 40]),
        ignore_eos=rng.random() < 0.7,
        seed=rng.choice([None, rng.randrange(-(2**63), 2**63)]),
        stop=rng.choice([[], [], ["ab"], ["q", "xyz"]]),
        stop_token_ids=rng.choice([[], [], [rng.randrange(64)]]),
        structured_outputs=StructuredOutputsParams(regex="of FakeGrammar") if rng.random() < 0.15 else None,
    )
    requests = tuple(
        _predicted(
            rng,
            size.max_model_len,
            GenerateRequest(
                request_id=f"r{number}{'ab'[i]}",
                prompt=prompt,
                params=params,
                timeout_s=timeout_s,
                cache_salt=rng.choice(["", "", "salt"]),
                session_id=rng.choice(["", "", "s1", "s2"]),
            ),
        )
        for i in range(rng.choice([1, 1, 1, 2]))
    )
    return Ask(
        at=rng.choice([rng.uniform(0.0, length_s), rng.uniform(0.0, 0.5)]),
        ingress=rng.randrange(size.ingresses),
        client=rng.choice("xyz"),
        requests=requests,
        leaves_after=rng.uniform(0.0, 60 * size.step_s) if rng.random() < 0.15 else None,
        slow_s=rng.choice([0.0, 0.0, 0.0, 0.2]),
    )


def _keyed(rng: random.Random, ask: Ask) -> list[Ask]:
    """Give most requests an idempotency key, and send some of them twice."""
    if rng.random() < 0.3:
        return [ask]
    requests = tuple(
        msgspec.structs.replace(request, timeout_s=None if request.timeout_s is None else 60.0)
        for request in ask.requests
    )
    leaves_after = rng.choice([None, rng.uniform(0.0, 2.0)])
    first = replace(ask, requests=requests, key=f"k{requests[0].request_id}", leaves_after=leaves_after, slow_s=0.0)
    if rng.random() < 0.5:
        return [first]
    late_s = rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 5)])
    return [first, replace(first, at=ask.at + late_s, ingress=ask.ingress + 1, client="w")]


def _predicted(rng: random.Random, max_model_len: int, request: GenerateRequest) -> GenerateRequest:
    """Give some requests a prediction of their output, from which tokens are drafted."""
    if rng.random() < 0.6:
        return request
    wrong = rng.choice([0.0, 0.1, 0.5])
    tokens = alone(request, max_model_len)[0]
    prediction = [rng.randrange(64) if rng.random() < wrong else token for token in tokens]
    return msgspec.structs.replace(request, prediction=prediction)


@dataclass
class Outcome:
    seconds: float = 0.0
    """Simulated."""
    error: BaseException | None = None
    log: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    """Of all messages."""
    steps: int = 0

    @property
    def kind(self) -> str:
        """What is wrong, without names."""
        if self.error is None:
            return ""
        text = str(self.error).split("\n")[0]
        return f"{type(self.error).__name__}: {''.join(c for c in text if not c.isdigit())[:60]}"


def run(day: Day) -> Outcome:
    """Live through a day."""
    loop, outcome = VirtualLoop(), Outcome()
    asyncio.set_event_loop(loop)
    gc.disable()  # a day is short
    with (
        mock.patch.object(timeline, "time", SimpleNamespace(time=loop.time)),
        mock.patch.object(job_module, "LiveGeneration", Computation),
    ):
        world = World(loop, day, outcome)
        try:
            loop.run_until(asyncio.ensure_future(world.live(), loop=loop))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcome.error = error
        finally:
            outcome.seconds = loop.time()
            if world.cluster is not None:
                outcome.log, outcome.seen = world.cluster.log, world.cluster.seen
                outcome.digest = world.cluster.digest
                world.count()
            _end(loop)
            asyncio.set_event_loop(None)
            loop.close()
            gc.enable()
    return outcome


def _end(loop: VirtualLoop) -> None:
    """Cancel what still runs, and look away."""
    loop.failure = None
    loop.set_exception_handler(lambda *_: None)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with suppress(Exception):
        loop.run_until(asyncio.ensure_future(asyncio.wait(tasks, timeout=1.0), loop=loop))


class World:
    def __init__(self, loop: VirtualLoop, day: Day, outcome: Outcome):
        self.loop, self.day, self.outcome = loop, day, outcome
        self.cluster: Cluster | None = None
        self._alone: dict[tuple[str, str], tuple[list[int], str, str]] = {}

    async def live(self) -> None:
        rng = random.Random(self.day.seed + 1)
        self.cluster = cluster = Cluster(self.loop, rng, self.day.size)
        cluster.network.loss, cluster.network.repeats = self.day.loss, self.day.repeats
        cluster.network.late_s, cluster.network.late = self.day.late_s, self.day.late
        cluster.network.busy = self.day.busy
        cluster.only_losses = self.day.only_losses
        cluster.start()
        clients = [
            asyncio.ensure_future(KeyedClient(self, ask).live() if ask.key else self._client(ask))
            for ask in self.day.asks
        ]
        watch = asyncio.ensure_future(self._watch())
        for fault in self.day.faults:
            self.loop.call_at(fault.at, self._strike, fault)
        _, late = await asyncio.wait(clients, timeout=self.day.last_at + LIMIT_S) if clients else (None, None)
        if late:
            names = [ask.requests[0].request_id for ask, c in zip(self.day.asks, clients, strict=True) if c in late]
            raise AssertionError(f"never ended: {' '.join(names)}")
        for client in clients:
            client.result()
        if watch.done():
            watch.result()  # it has failed
        watch.cancel()
        cluster.network.loss = cluster.network.repeats = cluster.network.busy = 0.0
        await asyncio.sleep(max(0.0, self.day.last_at - self.loop.time()))
        forgets = self.day.seed % 8 == 0
        await asyncio.sleep(SETTLE_S + FORGET_S * forgets)
        self._check_that_nothing_is_left(forgets)
        if self.day.is_calm:
            self._check_that_nothing_failed()

    def rng_of(self, ask: Ask) -> random.Random:
        """Return random numbers that do not depend on other requests."""
        return random.Random(f"{self.day.seed} {ask.key} {ask.client} {ask.at}")

    def alone(self, name: str, request: GenerateRequest) -> tuple[list[int], str, str]:
        """Return what `alone` does, computed once. name: of the request."""
        key = name, request.request_id
        if key not in self._alone:
            self._alone[key] = alone(request, self.day.size.max_model_len)
        return self._alone[key]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._check_queues()

    def _check_queues(self) -> None:
        """Check that no request waits in an ingress that may send it."""
        assert self.cluster is not None
        for ingress in [ingress for ingress in self.cluster.ingresses if ingress.up]:
            queue = ingress.admission._queue
            waits = queue.num_waiting and queue.num_running < queue.window
            assert not waits, "a request waits although it may start"

    # -- clients -------------------------------------------------------------------------------------------

    async def _client(self, ask: Ask) -> None:
        assert self.cluster is not None
        await asyncio.sleep(ask.at)
        ingress = await self.cluster.an_ingress(ask.ingress)
        name, began = ask.requests[0].request_id, self.loop.time()
        requests = [_addressed(request, ingress) for request in ask.requests]
        with_errors: ServingError | None = None
        listening = ingress.handle(self._listen(ask, requests, ingress))
        try:
            await asyncio.wait_for(listening, ask.leaves_after)
            return
        except TimeoutError:
            self.cluster.note(f"client of {name} has left")
            self.cluster.seen["client left"] += 1
            if self.day.is_calm:
                await self._check_that_it_ends({request.request_id for request in requests})
            return
        except asyncio.CancelledError:
            assert not ingress.up, f"{name} is cancelled"
            self.cluster.seen["a client loses its ingress"] += 1
            return
        except ServingError as error:
            with_errors = error
        self.cluster.note(f"{name} ends with {with_errors!r}")
        self.cluster.seen[f"ended {type(with_errors).__name__}"] += 1
        waited = self.loop.time() - began
        match with_errors:
            case FirstTokenLate():
                assert 0 <= with_errors.limit_s < with_errors.bound_s, f"{name} is refused, but not late"
            case Overloaded():
                assert len(self.day.asks) > self.day.size.max_waiting / 2, f"{name} is refused by an empty queue"
            case RequestTimeout():
                assert waited >= (ask.requests[0].timeout_s or 1e9) * (1 - self.day.size.drift) - 0.01, (
                    f"{name} timed out early, after {waited:.3f} s"
                )
            case EngineUnavailable() | TokensLost():
                pass  # checked by _listen
            case _:
                raise AssertionError(f"{name} ended with {with_errors!r}")
        timeout_s = ask.requests[0].timeout_s
        if timeout_s is not None:
            assert waited <= timeout_s + TIMEOUT_GRACE_S + 1.0 + ask.slow_s, f"{name} ended late, after {waited:.3f} s"

    async def _check_that_it_ends(self, names: set[str]) -> None:
        """Check that engines stop to compute these requests, once they hear that their client has left."""
        assert self.cluster is not None
        await asyncio.sleep(ABORTED_S)
        for engine in [engine for engine in self.cluster.engines.values() if engine.alive]:
            scheduler = engine.core.scheduler
            until = scheduler.totals.steps + ABORTED_STEPS
            while scheduler.totals.steps < until and scheduler.has_work and engine.alive:
                await asyncio.sleep(0.01)
            for name, request in scheduler.queue.live.items():
                of = request.asked_by.request_id if request.asked_by else name
                left = of.partition(".")[0] in names and request.state not in (State.FINISHED, State.LEASED)
                assert not left, f"{name} is still computed, but its client has left"

    async def _listen(self, ask: Ask, requests: list[GenerateRequest], ingress: Ingress) -> None:
        generation = LiveGeneration(ingress.context, [requests], ask.client)
        texts, tokens = ["" for _ in requests], [list[int]() for _ in requests]
        ended: dict[int, str] = {}
        expected = [alone(request, self.day.size.max_model_len) for request in requests]
        chunks = generation.chunks()
        try:
            async for chunk in chunks:
                self._check_queues()
                assert chunk.index not in ended, "a chunk after the end"
                texts[chunk.index] += chunk.text
                tokens[chunk.index] += chunk.token_ids
                right = expected[chunk.index]
                assert right[1].startswith(texts[chunk.index]), f"{requests[chunk.index].request_id}: another text"
                assert right[0][: len(tokens[chunk.index])] == tokens[chunk.index], "other tokens"
                if chunk.finish_reason is not None:
                    ended[chunk.index] = chunk.finish_reason
                    assert (texts[chunk.index], chunk.finish_reason) == right[1:], "a text ends elsewhere"
                if ask.slow_s:
                    await asyncio.sleep(ask.slow_s)
        except (EngineUnavailable, TokensLost):
            replays = max(s.retry.num_replays for s in generation._sequences.values())
            assert replays >= 3, f"{requests[0].request_id} was given up after {replays} replays"
            losses = sum(fault.kind in LOSSES for fault in self.day.faults)
            assert losses > 1, f"{requests[0].request_id} was given up after {losses} losses"
            raise
        finally:
            await chunks.aclose()
        assert len(ended) == len(requests), "a request ended without an end"
        usage = generation.usage
        assert usage.completion_tokens == sum(map(len, tokens)), "a request pays for other tokens than it has got"
        assert usage.cached_tokens <= usage.prompt_tokens, "more tokens of a prompt were cached than it has"
        assert self.cluster is not None
        self.cluster.note(f"{requests[0].request_id} ends: {ended[0]}, {len(tokens[0])} tokens")
        self.cluster.seen["ended well"] += 1

    # -- faults --------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        assert self.cluster is not None
        cluster = self.cluster
        replicas = [r for d in cluster.deployments.values() for r in d.replicas]
        if fault.moment:
            replicas = [replica for replica in replicas if _is_at(fault.moment, replica)]
            if not replicas and self.loop.time() < fault.at + PATIENCE_S:
                self.loop.call_later(LOOK_S, self._strike, fault)
        if not replicas:
            return
        replica, other = replicas[fault.number % len(replicas)], replicas[fault.other % len(replicas)]
        ingress = cluster.ingresses[fault.other % len(cluster.ingresses)]
        cluster.note(f"FAULT {fault.kind} {replica.engine_id} {other.engine_id} {fault.seconds:.2f} s {fault.moment}")
        cluster.seen[f"fault {fault.kind}{fault.moment and ' while it '}{fault.moment}"] += 1
        engine, later = replica.engine, cluster.loop.call_later
        match fault.kind:
            case "kill ingress":
                cluster.kill_ingress(ingress)
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
                now, lease_s = self.loop.time(), cluster.size.lease_s
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
                later(fault.seconds, setattr, cluster.network, "loss", self.day.loss)
            case "move":
                if replica.deployment.role == "decode":
                    replica.move_requests(1 + fault.number % 3)
            case "switch role":
                if cluster.size.roles:
                    replica.switch_role()
            case "drain":
                if not replica.stopping:
                    replica.tasks.append(asyncio.ensure_future(replica.depart()))
            case "scale":
                if not cluster.size.roles:
                    replica.deployment.scale(1 + fault.number % 3)
            case "reset cache":
                with suppress(EngineUnavailable):
                    replica.reset_prefix_cache()

    # -- the end -------------------------------------------------------------------------------------------

    def _check_that_nothing_is_left(self, forgotten: bool) -> None:
        assert self.cluster is not None
        check_jobs(self.cluster)
        for ingress in self.cluster.ingresses:
            _nothing(f"{ingress.node}: handlers", ingress.tasks)
            _nothing(f"{ingress.node}: jobs", ingress.jobs._live)
            _nothing(f"{ingress.node}: inboxes", ingress.inboxes._inboxes)
            _nothing(f"{ingress.node}: engines of requests", ingress.inboxes._working)
            _nothing(f"{ingress.node}: admitted", ingress.admission.num_running + ingress.admission.num_waiting)
            _nothing(f"{ingress.node}: starts", ingress.admission._starts)
            _nothing(f"{ingress.node}: timelines", ingress.context.timelines.num_live)
            _nothing(f"{ingress.node}: placements", ingress.router.balancer.placements._placements)
        for deployment in self.cluster.deployments.values():
            for replica in deployment.replicas:
                name, core, channel = replica.engine_id, replica.engine.core, replica.engine.channel
                _nothing(f"{name}: calls", replica._calls)
                _nothing(f"{name}: tasks", replica.calls)
                _nothing(f"{name}: answers", replica.num_answers)
                for dispatcher in replica._dispatchers.values():
                    _nothing(f"{name}: dispatched", dispatcher._calls)
                    placements = dispatcher.pool.router.balancer.placements  # type: ignore[attr-defined]
                    _nothing(f"{name}: placements", placements._placements)
                if not replica.engine.alive or replica.engine.paused:
                    continue
                core.scheduler.check()
                assert sum(core.ledger.ns.values()) == core.ledger.wall_ns, "time is lost"
                _nothing(f"{name}: work", core.scheduler.has_work)
                _nothing(f"{name}: live requests", core.scheduler.queue.live)
                _nothing(f"{name}: blocks in use", core.scheduler.kv_cache.pool.num_used)
                _nothing(f"{name}: receiving", core.scheduler.handoffs.receiving)
                _nothing(f"{name}: leased", core.scheduler.handoffs.leased)
                _nothing(f"{name}: fetches", core.scheduler.fetching.moving)
                _nothing(f"{name}: opened handoffs", core.scheduler.handoffs._opened_at)
                _nothing(f"{name}: deltas", replica.engine.endpoint._deltas)
                _nothing(f"{name}: ended", replica.engine.endpoint._ended)
                check_content(replica.engine)
                for block, key in enumerate(core.scheduler.kv_cache.pool._hash):
                    if key is not None:
                        kv = replica.engine.runner.content(block)
                        assert kv == self.cluster.named_kv[key], f"block {block} has other KV than its name says"
                for router in [] if replica.stopping else deployment.routers:
                    record = router.balancer.placements.engine(name)
                    _nothing(f"{router.name}: load of {name}", record.load.sequences + record.load.queued_tokens)
                    names = [*core.scheduler.kv_cache.pool.block_hashes(), *core.scheduler.offloading.hashes.all()]
                    there = set(block_keys(b"".join(names)))
                    _nothing(f"{router.name}: blocks of {name}", there ^ record.prefixes.stored.to_set())
                protocol = channel.endpoint._protocol
                _nothing(f"{name}: decode handoffs", protocol.decode_handoffs)
                _nothing(f"{name}: prefill handoffs", protocol.prefill_handoffs)
                _nothing(f"{name}: asked", protocol._asked)
                _nothing(f"{name}: reads", protocol._reads)
                if forgotten:
                    _nothing(f"{name}: released", protocol._released)
                _nothing(f"{name}: worker's reads", channel._reads)

    def _check_that_nothing_failed(self) -> None:
        """On a day without faults."""
        assert self.cluster is not None
        for ingress in self.cluster.ingresses:
            for reason in ("engine_unavailable", "tokens_lost"):
                _nothing(f"{ingress.node}: replays, {reason},", ingress.stats.replays[reason])
        for engine in self.cluster.engines.values():
            if engine.engine_id.startswith("p"):  # a request that moves may wait too long for its next engine
                _nothing(f"{engine.engine_id}: leases that expired", engine.channel.endpoint.stats().lease_expiries)

    def count(self) -> None:
        """Add up what has happened."""
        assert self.cluster is not None
        seen = self.cluster.seen
        for ingress in self.cluster.ingresses:
            for reason, count in ingress.stats.replays.items():
                seen[f"replay {reason}"] += count
        for engine in self.cluster.engines.values():
            scheduler = engine.core.scheduler
            self.outcome.steps += scheduler.totals.steps
            seen["role change"] += scheduler.handoffs.role_changes
            seen["preemption"] += scheduler.totals.preemptions
            if drafts := scheduler.speculation.stats:
                seen["draft accepted"] += drafts.num_accepted_tokens
                seen["draft rejected"] += drafts.num_draft_tokens - drafts.num_accepted_tokens
            for outcome, count in scheduler.handoffs.moves.items():
                seen[f"move {outcome}"] += count
            for outcome, count in getattr(scheduler.fetching, "fetches", {}).items():
                seen[f"fetch {outcome}"] += count
            stats = engine.channel.endpoint.stats()
            for name, value in _counts(stats).items():
                seen[f"handoff {name}"] += value


def _counts(stats: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in stats.__struct_fields__:
        value = getattr(stats, name)
        if name == "results":
            found |= {f"{what} {why}".strip(): n for what, counts in value.items() for why, n in counts.items()}
        elif isinstance(value, dict):
            found |= {f"{name} {key}": count for key, count in value.items() if isinstance(count, int)}
        elif isinstance(value, int):
            found[name] = value
    return found


def _is_at(moment: str, replica: Replica) -> bool:
    """Return whether an engine reads KV, holds KV that another engine reads, computes a prompt or runs a sequence."""
    engine = replica.engine
    if not engine.alive:
        return False
    protocol, running = engine.channel.endpoint._protocol, engine.core.scheduler.queue.running
    match moment:
        case "reads":
            return any(handoff.reading is not None for handoff in protocol.decode_handoffs.values())
        case "leases":
            return bool(protocol.prefill_handoffs)
        case "computes":
            return any(0 < request.computed < len(request.tokens) - 1 for request in running)
        case "runs":
            return any(request.num_output > 1 for request in running)
    raise ValueError(moment)


def _other_end(replica: Replica) -> str | None:
    """Return the node of an engine with which this one has a handoff."""
    protocol, engines = replica.engine.channel.endpoint._protocol, replica.cluster.engines
    peers = [handoff.source for handoff in protocol.decode_handoffs.values()]
    peers += [handoff.decode for handoff in protocol.prefill_handoffs.values()]
    return next((engines[peer.engine_id].node for peer in peers if peer and peer.engine_id in engines), None)


def _addressed(request: GenerateRequest, ingress: Ingress) -> GenerateRequest:
    return msgspec.structs.replace(request, reply_to=ingress.inboxes.address)


def _nothing(what: str, left: Any) -> None:
    assert not left, f"{what} left: {left if isinstance(left, int) else list(left)[:5]}"


def shrink(day: Day, fails: Callable[[Day], bool], tries: int = 60) -> Day:
    """Return a smaller day on which the same is wrong."""
    for name in ("faults", "asks"):
        step = max(1, len(getattr(day, name)) // 2)
        while tries > 0:
            start, smaller = 0, False
            while start < len(getattr(day, name)) and tries > 0:
                parts = getattr(day, name)
                candidate = replace(day, **{name: parts[:start] + parts[start + step :]})
                tries -= 1
                if fails(candidate):
                    day, smaller = candidate, True
                else:
                    start += step
            if step == 1 and not smaller:
                break
            step = max(1, step // 2)
    return day
