"""Agents on several replicas that fetch cached KV from each other, or not: `python -m benchmarks.prefix_fetching`.

The real router sends each turn to one of the replicas, which are processes. All runs use the same replicas and the same
agents; the caches are emptied in between. Without fetching, a replica is not told which other has a longer prefix.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import typer
import zmq
import zmq.asyncio

from benchmarks.agent_load import AnswerOption, FirstOption, Load, ModelOption, ToolOption, percentiles
from benchmarks.command import JsonOption, print_report, run
from benchmarks.engine_process import Engines
from cluster.terminal.tables import figure, make_table, show
from deployments.routing.balancer import Balancer
from deployments.routing.config import PolicyName, RoutingConfig
from deployments.routing.prompt_digest import PromptDigester
from deployments.routing.subscriber import KVEventSubscriber
from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add, ResetPrefixCache
from engine.wire.parts.kv_fetching import FetchStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenBatch, TokenDelta

POLICIES: tuple[PolicyName, ...] = ("prefix_aware", "round_robin")
VOCAB = 4000
SETTLE_S = 2.0  # until all statuses and updates of a run have come
ANSWER_S = 120.0


@dataclass(slots=True)
class PolicyResult:
    policy: str
    fetching: bool
    resumed_tokens: int = 0  #: prompt tokens of all turns but the first ones
    cached_tokens: int = 0  #: of these
    first_token_s: list[float] = field(default_factory=list)  #: of these turns
    fetched_tokens: int = 0
    fetches: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchReport:
    model: str
    replicas: int
    load: Load
    pause_s: float
    outcomes: list[PolicyResult]
    equal_answers: bool


class Replicas:
    """The replicas, as an ingress sees them."""

    def __init__(self, engines: Engines, names: list[str], block_size: int):
        self._engines, self._names, self._block_size = engines, names, block_size
        self._context = zmq.asyncio.Context()
        self._tokens = self._context.socket(zmq.PULL)
        self._reply_to = f"tcp://127.0.0.1:{self._tokens.bind_to_random_port('tcp://127.0.0.1')}"
        self._inboxes: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._digester = PromptDigester(block_size)
        self._balancer = Balancer(RoutingConfig(), "decode", block_size, random.Random(0))
        self._subscriber = KVEventSubscriber("127.0.0.1", lambda update: self._balancer.update(update))
        self._tasks = [asyncio.create_task(self._subscriber.run()), asyncio.create_task(self._receive())]

    async def reset(self, policy: PolicyName) -> None:
        """Empty all caches, and route by another policy."""
        for name in self._names:
            self._engines[name].send(ResetPrefixCache())
        self._subscriber.subscribe({})
        self._balancer = Balancer(RoutingConfig(policy=policy), "decode", self._block_size, random.Random(0))
        self._subscriber.subscribe({name: self._engines[name].address for name in self._names})
        await asyncio.sleep(SETTLE_S)

    async def ask(self, request: GenerateRequest, fetching: bool) -> tuple[float, int, list[int]]:
        """Return the seconds to the first token, the cached prompt tokens, and the answer."""
        inbox = self._inboxes[request.request_id] = asyncio.Queue()
        began = time.perf_counter()
        prompt = self._digester.digest(request.request_id, request.prompt, "")
        decision = self._balancer.choose(prompt, self._names)
        holder = decision.holder if fetching else None
        request = msgspec.structs.replace(request.asking(holder), reply_to=self._reply_to)
        self._engines[decision.engines[0]].send(Add(request))
        first_s, cached, answer = 0.0, 0, list[int]()
        while True:
            delta = await asyncio.wait_for(inbox.get(), ANSWER_S)
            if delta.token_ids and not answer:
                first_s, cached = time.perf_counter() - began, delta.num_cached_tokens
            answer += delta.token_ids
            if delta.finish_reason:
                break
        assert delta.finish_reason == "length", delta.error
        del self._inboxes[request.request_id]
        self._balancer.end(request.request_id, confirmed=True)
        return first_s, cached, answer

    def stats(self) -> list[EngineStats]:
        return [self._engines.stats(name) for name in self._names]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _receive(self) -> None:
        decode = msgspec.msgpack.Decoder(TokenBatch).decode
        while True:
            for delta in decode(await self._tokens.recv()).deltas:
                self._inboxes[delta.request_id].put_nowait(delta)


def fetched(stats: EngineStats) -> FetchStats:
    return stats.record(FetchStats) or FetchStats({}, 0)


async def drive(
    replicas: Replicas, load: Load, pause_s: float, policy: PolicyName, fetching: bool
) -> tuple[PolicyResult, list[list[int]]]:
    """Let all agents take their turns. Returns the contexts at the end, too. pause_s: mean between the turns of an
    agent, exponential."""
    outcome = PolicyResult(policy, fetching)
    await replicas.reset(policy)
    before = [fetched(stats) for stats in replicas.stats()]
    params = SamplingParams(temperature=0.0, max_tokens=load.answer, ignore_eos=True)

    async def agent(number: int) -> list[int]:
        draw = random.Random(number)
        context = draw.choices(range(3, VOCAB), k=load.first)
        for turn in range(load.turns):
            await asyncio.sleep(draw.expovariate(1 / pause_s))
            name = f"{policy} {fetching} {number} {turn} {time.monotonic_ns()}"
            request = GenerateRequest(request_id=name, prompt=context, params=params)
            first_s, cached, answer = await replicas.ask(request, fetching)
            if turn:
                outcome.resumed_tokens += len(context)
                outcome.cached_tokens += cached
                outcome.first_token_s.append(first_s)
            context = [*context, *answer, *draw.choices(range(3, VOCAB), k=load.tool)]
        return context

    began = time.perf_counter()
    contexts = await asyncio.gather(*(agent(number) for number in range(load.agents)))
    outcome.seconds = time.perf_counter() - began
    await asyncio.sleep(SETTLE_S)
    for old, new in zip(before, map(fetched, replicas.stats()), strict=True):
        outcome.fetched_tokens += new.fetched_tokens - old.fetched_tokens
        for what, count in new.fetches.items():
            outcome.fetches[what] = outcome.fetches.get(what, 0) + count - old.fetches.get(what, 0)
    return outcome, contexts


async def measure(
    model: str, num_replicas: int, load: Load, pause_s: float, block_size: int, repetitions: int
) -> FetchReport:
    handoff = HandoffConfig(role="replica", enable_prefix_fetching=True, transport="tcp")
    config = EngineConfig(
        model=model, num_threads=1, block_size=block_size,
        num_gpu_blocks_override=2 * load.agents * -(-load.longest // block_size),
        max_num_seqs=8, max_model_len=load.longest + load.tool, handoff=handoff,
    )  # fmt: skip
    names, cores = [f"replica {i}" for i in range(num_replicas)], sorted(os.sched_getaffinity(0))
    outcomes, ends = [], []
    with Engines({name: (config, [cores[i % len(cores)]]) for i, name in enumerate(names)}) as engines:
        replicas = Replicas(engines, names, block_size)
        try:
            await drive(replicas, Load(2 * num_replicas, 3, 200, 40, 4), 0.1, "round_robin", True)  # warms up
            for _ in range(repetitions):
                for policy in POLICIES:
                    for fetching in (False, True):
                        outcome, contexts = await drive(replicas, load, pause_s, policy, fetching)
                        outcomes.append(outcome)
                        ends.append(contexts)
        finally:
            await replicas.close()
    return FetchReport(model, num_replicas, load, pause_s, outcomes, all(end == ends[0] for end in ends))


def show_report(report: FetchReport) -> None:
    print(f"{report.load}, pauses of {report.pause_s:g} s, on {report.replicas} replicas")
    table = make_table("policy", "fetching", "tokens cached", "P50 ms", "P99 ms", "tokens fetched", "fetches", "s")
    for outcome in report.outcomes:
        p50, p99 = percentiles(outcome.first_token_s)
        table.add_row(
            outcome.policy,
            "on" if outcome.fetching else "off",
            f"{outcome.cached_tokens / outcome.resumed_tokens:.0%}",
            figure(1000 * p50, 0),
            figure(1000 * p99, 0),
            str(outcome.fetched_tokens),
            ", ".join(f"{count} {what}" for what, count in sorted(outcome.fetches.items()) if count) or "none",
            figure(outcome.seconds, 1),
        )
    show(table)
    print(f"answers {'equal' if report.equal_answers else 'DIFFERENT'}")


def main(
    model: ModelOption = "pocket",
    replicas: int = 4,
    agents: int = 20,
    turns: int = 6,
    first: FirstOption = 600,
    tool: ToolOption = 80,
    answer: AnswerOption = 16,
    pause_s: Annotated[float, typer.Option(help="Mean pause between the turns of an agent.")] = 2.0,
    block_size: int = 16,
    repetitions: int = 1,
    json_output: JsonOption = False,
) -> None:
    """Measure what agents find cached, and how soon their first token comes, with fetching and without."""
    load = Load(agents, turns, first, tool, answer)
    report = asyncio.run(measure(model, replicas, load, pause_s, block_size, repetitions))
    print_report(report, json_output, show_report)


if __name__ == "__main__":
    run(main)
