"""What agents see of a server: warm turns beside cold prompts, and sessions of the published shape."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from benchmarks.peer_engines import LAST_ID
from benchmarks.peer_servers import MODEL
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult
from cluster.cli.bench.prompts import random_ids, trace_prompts
from cluster.cli.bench.turns import session_id
from cluster.lab.simulator.conversations.turn import DueTurns
from cluster.lab.simulator.trace import Trace, make_trace
from engine.errors import EngineUnavailable

REQUEST_S = 300.0
FIRST_S = 60.0  # for the first prompts of all sessions, or they are too many
REQUESTS_OF_A_SESSION = 100  # more than the mean, so that there are as many sessions as are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """Warm turns and cold prompts, in tokens."""

    context: int  #: of a warm turn that is cached
    turn: int  #: that are new in it
    cold: int  #: of a cold prompt
    answer: int
    think_s: float  #: mean pause between two warm turns


@dataclass(slots=True)
class TurnTimes:
    """Seconds of warm turns and of cold prompts."""

    warm_first_s: list[float] = field(default_factory=list)  #: to the first token
    cold_s: list[float] = field(default_factory=list)  #: to the end
    tokens: int = 0  #: that had to be computed, and answered
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class TurnClients:
    """One agent with a warm context, and another client with cold prompts."""

    def __init__(self, client: OpenAIClient, shape: TurnShape, seed: int):
        self._client, self._shape, self._random = client, shape, random.Random(seed)
        self._context = random_ids(self._random, shape.context, LAST_ID)

    async def begin(self) -> None:
        """Compute the context, and turns that warm the server up."""
        for _ in range(3):
            await self._turn()
        await self._ask(random_ids(self._random, self._shape.cold, LAST_ID))

    async def warm_alone(self, turns: int) -> TurnTimes:
        times = TurnTimes()
        for _ in range(turns):
            times.warm_first_s.append((await self._turn()).ttft_s)
        return times

    async def cold_alone(self, prompts: int) -> TurnTimes:
        times, started = TurnTimes(), time.perf_counter()
        for _ in range(prompts):
            await self._cold(times)
        times.seconds = time.perf_counter() - started
        return times

    async def together(self, seconds: float) -> TurnTimes:
        """Send cold prompts one after another for so long, and warm turns with pauses beside them."""
        times, started = TurnTimes(), time.perf_counter()
        over = asyncio.Event()

        async def turns() -> None:
            while not over.is_set():
                await asyncio.sleep(self._shape.think_s * self._random.uniform(0.5, 1.5))
                if over.is_set():
                    return
                outcome = await self._turn()
                times.warm_first_s.append(outcome.ttft_s)
                times.tokens += self._shape.turn + outcome.output_tokens

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(turns())
            while time.perf_counter() < started + seconds:
                await self._cold(times)
            over.set()
        times.seconds = time.perf_counter() - started
        return times

    async def _turn(self) -> RequestResult:
        return await self._ask([*self._context, *random_ids(self._random, self._shape.turn, LAST_ID)], "warm")

    async def _cold(self, times: TurnTimes) -> None:
        outcome = await self._ask(random_ids(self._random, self._shape.cold, LAST_ID))
        times.cold_s.append(outcome.e2el_s)
        times.tokens += self._shape.cold + outcome.output_tokens

    async def _ask(self, prompt: list[int], session: str = "") -> RequestResult:
        outcome = await self._client.send("/v1/completions", body(prompt, self._shape.answer), session)
        if outcome.error is not None:
            raise EngineUnavailable(f"a request failed: {outcome.error}")
        return outcome


def body(prompt: list[int], answer: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": MODEL, "prompt": prompt, "max_tokens": answer, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    """Sessions of agents, and what each of their turns must keep."""

    scale: float  #: of tokens
    time_scale: float  #: of the times that tools run
    window_s: float  #: for which turns are counted, after the first prompts of all sessions
    longest: int  #: tokens of a context, above which a turn is left out
    ttft_s: float
    tpot_s: float
    good: float  #: share of the turns that must keep both

    def trace(self, sessions: int) -> Trace:
        """Return sessions that begin somewhere in their middle."""
        drawn = make_trace("agents", sessions * REQUESTS_OF_A_SESSION, 1.0, seed=sessions).scaled(self.scale)
        return midway(drawn.in_time(self.time_scale), self.longest, sessions).with_active(sessions)

    def keeps(self, outcome: RequestResult) -> bool:
        return outcome.error is None and outcome.ttft_s <= self.ttft_s and (outcome.tpot_s or 0.0) <= self.tpot_s


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """What turns of so many sessions saw."""

    sessions: int
    turns: int
    good: float  #: share that kept both targets
    first_token_p90_s: float
    tokens_per_s: float  #: prompts and answers
    cached: float | None  #: share of the prompts' tokens, if the server tells

    @classmethod
    def of(cls, sessions: int, load: SessionLoad, outcomes: Sequence[RequestResult]) -> SessionFigures:
        done = [outcome for outcome in outcomes if outcome.error is None]
        prompts = sum(outcome.prompt_tokens or 0 for outcome in done)
        told = [outcome.cached_tokens for outcome in done if outcome.cached_tokens is not None]
        return cls(
            sessions,
            len(outcomes),
            sum(map(load.keeps, outcomes)) / max(1, len(outcomes)),
            float(np.percentile([outcome.ttft_s for outcome in done], 90)) if done else 0.0,
            (prompts + sum(outcome.output_tokens for outcome in done)) / load.window_s,
            sum(told) / prompts if told and prompts else None,
        )


def midway(trace: Trace, longest: int, seed: int) -> Trace:
    """Return the requests of each conversation from a moment on that is drawn evenly from its time, and only those that
    fit."""
    draw, turns = random.Random(seed), trace.turns or []
    times = trace.arrivals_s.tolist()
    begins, ends = dict[int, float](), dict[int, float]()
    for turn, at in zip(turns, times, strict=True):
        begins.setdefault(turn.session, at)
        ends[turn.session] = at
    cuts = {session: draw.uniform(begins[session], ends[session]) for session in begins}
    fits = (trace.prompt_tokens + trace.output_tokens <= longest).tolist()
    return trace.only([i for i, turn in enumerate(turns) if fits[i] and times[i] >= cuts[turn.session]])


async def run_sessions(client: OpenAIClient, load: SessionLoad, sessions: int) -> SessionFigures | None:
    """Have so many sessions at a time: compute the first prompts of all, then count the turns of a while. Returns None
    if the first prompts take too long."""
    trace = load.trace(sessions)
    turns, outcomes = trace.turns or [], list[RequestResult]()
    bodies = [
        body(prompt, answer)
        for prompt, answer in zip(trace_prompts(trace, LAST_ID, sessions), trace.output_tokens.tolist(), strict=True)
    ]
    due = DueTurns(turns)

    async def send(index: int) -> RequestResult:
        return await client.send("/v1/completions", bodies[index], session_id(turns[index]))

    try:
        async with asyncio.timeout(FIRST_S):
            await asyncio.gather(*(send(index) for index in due.first))
    except TimeoutError:
        return None
    over_at = time.perf_counter() + load.window_s

    async def one(index: int, wait_s: float) -> None:
        if time.perf_counter() + wait_s >= over_at:
            return
        await asyncio.sleep(wait_s)
        outcomes.append(await send(index))
        follow(index)

    def follow(index: int) -> None:
        for other in due.ended(index):
            tasks.create_task(one(other, turns[other].think_s))

    async with asyncio.TaskGroup() as tasks:
        for index in due.first:
            follow(index)
    return SessionFigures.of(sessions, load, outcomes)
