"""The effect of long prompts on running streams: one engine for both, against a pool for each, on the same cores."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
import typer
import zmq
import zmq.asyncio
from rich.progress import Progress

from benchmarks.command import DtypeOption, JsonOption, ModelOption, SeedOption, print_json, run
from benchmarks.engine_process import Engines
from cluster.cli.bench.progress import progress_bar
from cluster.cli.bench.tables import figure, make_table, show
from engine.config import EngineConfig, HandoffConfig
from engine.errors import EngineError, InvalidParameter
from engine.wire.messages import Add, GenerateRequest, TokenBatch
from engine.wire.sampling_params import SamplingParams

STREAM_PROMPT = 32  # tokens
STREAM = "stream-"
LONG_OUTPUT = 4  # tokens; their first is what counts
WARM_S = 2.0  # from the first token of every stream until the measurement
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    streams: int  #: that run all the time
    prompt_len: int  #: tokens of each long prompt
    interval_s: float  #: from one long prompt to the next
    duration_s: float  #: of one measurement
    vocab_size: int
    seed: int


@dataclass(slots=True)
class Setup:
    """One way to use the cores, and its latencies: one entry per repetition, in milliseconds."""

    name: str
    itl_p50_ms: list[float] = field(default_factory=list)
    itl_p99_ms: list[float] = field(default_factory=list)
    itl_max_ms: list[float] = field(default_factory=list)
    ttft_p50_ms: list[float] = field(default_factory=list)
    stream_tokens_per_s: list[float] = field(default_factory=list)
    remote_prompts: int = 0

    def median(self, name: str) -> float:
        """Return the median over the repetitions."""
        return statistics.median(getattr(self, name))


@dataclass(frozen=True, slots=True)
class IsolationReport:
    model: str
    cores: int
    repetitions: int
    traffic: Traffic
    setups: list[Setup]

    @property
    def gain(self) -> float:
        """P99 time between tokens: the better of the shared engines over that of the two pools."""
        *shared, pools = (setup.median("itl_p99_ms") for setup in self.setups)
        return min(shared) / pools


def measure(
    *, model: str, dtype: str, max_model_len: int | None, traffic: Traffic, repetitions: int, chunk: int,
    progress: Progress,
) -> IsolationReport:  # fmt: skip
    """Measure the setups in turn. chunk: tokens per step of the second shared engine, which spares its streams by
    taking prompts in small pieces."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cores) < 2:
        raise InvalidParameter("cores", len(cores), "at least 2, one for each pool")
    half = len(cores) // 2

    def config(**more: object) -> EngineConfig:
        return EngineConfig(model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=64, **more)  # type: ignore[arg-type]

    ways: dict[str, dict[str, tuple[EngineConfig, Sequence[int]]]] = {
        "one engine": {"decode": (config(), cores)},
        f"one engine, {chunk} tokens per step": {"decode": (config(max_num_batched_tokens=chunk), cores)},
        "prefill pool + decode pool": {
            "prefill": (config(handoff=HandoffConfig(role="prefill")), cores[:half]),
            "decode": (config(handoff=HandoffConfig(role="decode")), cores[half:]),
        },
    }
    setups = [Setup(name) for name in ways]
    bar = progress.add_task("isolation", total=repetitions * len(setups))
    for repetition in range(repetitions):
        for setup in setups:
            with Engines(ways[setup.name]) as engines:
                asyncio.run(_run(engines, traffic, setup, seed=traffic.seed + repetition))
                setup.remote_prompts += engines.remote_prompts("decode")
            progress.advance(bar)
    return IsolationReport(model, len(cores), repetitions, traffic, setups)


async def _run(engines: Engines, traffic: Traffic, setup: Setup, seed: int) -> None:
    client = Client(engines, traffic, seed)
    receiving = asyncio.create_task(client.receive())
    try:
        for _ in range(traffic.streams):
            client.add_stream()
        await client.until(lambda: len(client.arrivals) == traffic.streams, receiving)
        await asyncio.sleep(WARM_S)
        began = time.perf_counter()
        prompts = max(1, round(traffic.duration_s / traffic.interval_s))
        for i in range(prompts):
            await asyncio.sleep(max(0.0, began + i * traffic.interval_s - time.perf_counter()))
            client.add(f"long-{i}", traffic.prompt_len, output=LONG_OUTPUT)
        await client.until(lambda: all(f"long-{i}" in client.arrivals for i in range(prompts)), receiving)
        ended = time.perf_counter()
        streams = [[t for t in times if t >= began] for name, times in client.arrivals.items() if is_stream(name)]
        gaps_ms = [1000 * (b - a) for times in streams for a, b in pairwise(times)]
        ttft_ms = [1000 * (client.arrivals[f"long-{i}"][0] - client.sent[f"long-{i}"]) for i in range(prompts)]
        setup.itl_p50_ms.append(float(np.percentile(gaps_ms, 50)))
        setup.itl_p99_ms.append(float(np.percentile(gaps_ms, 99)))
        setup.itl_max_ms.append(max(gaps_ms))
        setup.ttft_p50_ms.append(float(np.percentile(ttft_ms, 50)))
        setup.stream_tokens_per_s.append(sum(map(len, streams)) / (ended - began))
    finally:
        receiving.cancel()
        client.close()


class Client:
    """Sends requests to the engine `decode`, and records the arrival times of tokens, by `time.perf_counter`."""

    def __init__(self, engines: Engines, traffic: Traffic, seed: int):
        self.sent: dict[str, float] = {}
        self.arrivals: dict[str, list[float]] = {}
        self._engine = engines["decode"]
        self._random = np.random.default_rng(seed)
        self._vocab_size = traffic.vocab_size
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._address = f"tcp://127.0.0.1:{self._inbox.bind_to_random_port('tcp://127.0.0.1')}"
        self._received = asyncio.Event()

    def add(self, request_id: str, prompt_len: int, output: int | None) -> None:
        prompt = self._random.integers(10, self._vocab_size, prompt_len).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self.sent[request_id] = time.perf_counter()
        self._engine.send(
            Add(GenerateRequest(request_id=request_id, prompt=prompt, params=params, reply_to=self._address))
        )

    def add_stream(self) -> None:
        self.add(f"{STREAM}{len(self.sent)}", STREAM_PROMPT, output=None)

    async def receive(self) -> None:
        """Receive until cancelled; start a new stream for each that has reached the model's limit. Raises EngineError
        if a request fails."""
        decode = msgspec.msgpack.Decoder(TokenBatch).decode
        while True:
            batch = decode(await self._inbox.recv())
            now = time.perf_counter()
            for delta in batch.deltas:
                if delta.error is not None:
                    raise EngineError(delta.request_id, delta.error.message)
                if delta.token_ids:
                    self.arrivals.setdefault(delta.request_id, []).append(now)
                if delta.finish_reason is not None and is_stream(delta.request_id):
                    self.add_stream()
            self._received.set()

    async def until(self, condition: Callable[[], bool], receiving: asyncio.Task[None]) -> None:
        """Wait for a condition. Raises the error of `receiving`, or TimeoutError."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not condition():
                self._received.clear()
                received = asyncio.create_task(self._received.wait())
                await asyncio.wait([received, receiving], return_when=asyncio.FIRST_COMPLETED)
                received.cancel()
                if receiving.done():
                    receiving.result()

    def close(self) -> None:
        self._context.destroy(linger=0)


def is_stream(request_id: str) -> bool:
    return request_id.startswith(STREAM)


def show_report(report: IsolationReport) -> None:
    table = make_table("", *(setup.name for setup in report.setups))
    rows = [
        ("time between tokens, ms: median", "itl_p50_ms", 1),
        ("P99", "itl_p99_ms", 1),
        ("longest", "itl_max_ms", 1),
        ("time to first token of a long prompt, ms", "ttft_p50_ms", 0),
        ("tokens/s of the running streams", "stream_tokens_per_s", 0),
    ]
    for name, key, decimals in rows:
        table.add_row(name, *(figure(setup.median(key), decimals) for setup in report.setups))
    traffic = report.traffic
    show(
        f"{report.model}, {report.cores} cores: {traffic.streams} streams, and a prompt of {traffic.prompt_len} tokens "
        f"every {traffic.interval_s:g} s; medians of {report.repetitions} repetitions of {traffic.duration_s:g} s",
        table,
        f"P99 time between tokens: the better of the shared engines takes {report.gain:.1f} times as long as two pools",
        f"prompts that the decode engine had computed elsewhere: {report.setups[-1].remote_prompts}",
    )


def main(
    model: ModelOption = "pocket",
    streams: Annotated[int, typer.Option(min=1, help="Streams that run all the time.")] = 8,
    prompt_len: Annotated[int, typer.Option(min=2, help="Tokens of each long prompt.")] = 1500,
    interval_s: Annotated[float, typer.Option(min=0.01, help="From the start of one long prompt to the next.")] = 1.0,
    duration_s: Annotated[float, typer.Option(min=1, help="Length of one measurement.")] = 10.0,
    chunk: Annotated[int, typer.Option(min=64, help="Tokens per step of the second shared engine.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=11, help="Token ids are below this; the model must have them.")] = 1000,
    seed: SeedOption = 0,
    repetitions: Annotated[int, typer.Option(min=1, help="Each with new prompts; the setups take turns.")] = 3,
    dtype: DtypeOption = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt + answer, in tokens.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the effect of long prompts on running streams: one engine for both, against two pools.

    The same cores for all: one engine with all of them, or two engines with half of them each. The first token of a
    long prompt may come later from the pools, since only half of the cores compute it.

    Example: python -m benchmarks.isolation --streams 4 --prompt-len 1000
    """
    traffic = Traffic(
        streams=streams, prompt_len=prompt_len, interval_s=interval_s, duration_s=duration_s, vocab_size=vocab_size,
        seed=seed,
    )  # fmt: skip
    with progress_bar() as progress:
        report = measure(
            model=model, dtype=dtype, max_model_len=max_model_len, traffic=traffic, repetitions=repetitions,
            chunk=chunk, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(asdict(report) | {"gain": report.gain})
    else:
        show_report(report)


if __name__ == "__main__":
    run(main)
