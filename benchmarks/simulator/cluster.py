"""A real cluster behind HTTP, started as a user starts it, against a simulation of the same trace.

What steps cost, and what HTTP adds to them, is fitted to probes (http_calibration.py) before and
after each group of runs: never to the runs themselves.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.simulator.http_calibration import ROUNDS, HttpFit, Observation, completion, fit_observations, observe
from benchmarks.simulator.slow_calls import SlowCalls
from benchmarks.simulator.traffic import grouped_trace, small_trace
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.cli.bench.prompts import FIRST_ID
from cluster.cli.bench.serve import send_all
from cluster.lab.simulator.results import Latencies, Report
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import PIECE, Trace
from engine import pocket
from engine.config import EngineConfig
from tests.models import make_model
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

LOADS = (0.4, 0.65)  # share of the time in which the busier pool computes, as simulated
REPEATS, REQUESTS = 3, 100
GROUPS = 16  # of prompts that begin alike
VOCABULARY = 4000
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ENGINE = {
    "num_threads": 1,
    "num_gpu_blocks_override": 512,
    "block_size": 16,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
}
CONFIG = EngineConfig(**ENGINE, async_scheduling=False, max_waiting=10**9)  # type: ignore[arg-type]
MAX_MODEL_LEN = 2048
START_S = 180.0

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """prefill: replicas for prompts only. decode: that answer. kv_bytes: of a token."""

    name: str
    prefill: int
    decode: int
    model: str = "pocket"
    kv_bytes: float = 2 * 4 * 4 * 32 * 2.0  # K and V, 4 layers, 4 heads of 32, bfloat16

    @property
    def section(self) -> dict[str, Any]:
        """The model's section of serve_config.yaml."""
        section = {"name": "pocket", "model": self.model, "engine": {**ENGINE, "dtype": "bfloat16"}}
        section["decode"] = {"num_replicas": self.decode, "num_cpus": 0.25}
        if self.prefill:
            section |= {"prefill": {"num_replicas": self.prefill, "num_cpus": 0.25}, "handoff": {"policy": "always"}}
        return section

    def trace(self, rate: float, seed: int) -> Trace:
        """Return a trace, with shared prefixes where the router has a choice."""
        return small_trace(REQUESTS, rate, seed) if self.prefill else grouped_trace(REQUESTS, rate, seed, GROUPS)


LAYOUTS = (PoolSizes("two replicas", 0, 2), PoolSizes("1 prefill + 1 decode", 1, 1))


@dataclass(frozen=True, slots=True)
class Compared:
    """Figures of each run: those that clients saw, and those that were simulated."""

    title: str
    real: list[Figures]
    simulated: list[Figures]

    def row(self, name: str) -> str:
        """Medians of the runs, and the median of their errors."""
        real, simulated = (statistics.median(run[name] for run in runs) for runs in (self.real, self.simulated))
        error = statistics.median(s[name] / r[name] - 1 for r, s in zip(self.real, self.simulated, strict=True))
        return f"{real:,.1f} | {simulated:,.1f} | {error:+.0%}"


def cluster() -> None:
    compare(LAYOUTS)


def larger() -> None:
    """Compare with steps of several ms, beside which HTTP is less: a model of 25M random parameters."""
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        }
        heads: dict[str, Any] = {
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 4096,
            "max_position_embeddings": MAX_MODEL_LEN,
        }
        model = make_model(Path(folder), "qwen3", **sizes, **heads)
        for file in TOKENIZER:
            shutil.copy(pocket.PATH / file, model)
        kv_bytes = 2 * 8 * 4 * 64 * 2.0
        compare([replace(layout, model=str(model), kv_bytes=kv_bytes) for layout in LAYOUTS])


def compare(layouts: Iterable[PoolSizes]) -> None:
    request_s = 0.0
    print(f"other programs use {psutil.cpu_percent(5.0):.0f}% of {psutil.cpu_count()} cores", flush=True)
    for layout in layouts:
        with serving(layout) as server:
            asyncio.run(probe(server, layout, rounds=1))  # compiles kernels, makes connections
            before, found = asyncio.run(probe(server, layout)), []
            for load in LOADS:
                rate = rate_of(layout, fit_observations(before), load)
                traces = [layout.trace(rate, seed) for seed in range(1, REPEATS + 1)]
                real = [asyncio.run(replay(server, layout, trace)) for trace in traces]
                after = asyncio.run(probe(server, layout))
                fit = fit_observations(before + after)
                before = after
                if not layout.prefill:
                    request_s = fit.request_s
                simulated = [figures(layout, simulation(layout, fit, request_s, trace)) for trace in traces]
                found.append(Compared(f"{load:.0%} busy, {rate:.1f} requests/s", real, simulated))
                print(f"{layout.name}, {found[-1].title}: {fit}", flush=True)
        show(layout, found)


# -- real --------------------------------------------------------------------------------------------------


@contextmanager
def serving(layout: PoolSizes) -> Iterator[ServeRun]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ServeRun(Path(folder), {"models": [layout.section]}, manta=True) as server,
    ):
        for _ in range(layout.decode):
            server.wait_for_line("fits this decode engine" if layout.prefill else "replica ready", START_S)
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, START_S)
        wait_until(lambda: scrape(server).sum("manta_up") == layout.decode, START_S)
        yield server


async def probe(server: ServeRun, layout: PoolSizes, rounds: int = ROUNDS) -> list[Observation]:
    async with OpenAIClient(server.url, None, timeout_s=60) as client:
        budget, apart = CONFIG.max_num_batched_tokens, bool(layout.prefill)
        return await observe(client, "pocket", layout.decode, budget, apart=apart, rounds=rounds)


async def replay(server: ServeRun, layout: PoolSizes, trace: Trace) -> Figures:
    """Streams at the times of the trace, however slow the answers are."""
    salt = f"{trace.arrivals_s[0]}-{trace.duration_s}"  # what other runs computed is in no cache
    bodies = [
        completion("pocket", token_ids(trace, i), int(tokens), cache_salt=salt)
        for i, tokens in enumerate(trace.output_tokens)
    ]
    before = hits(server)
    async with OpenAIClient(server.url, None, timeout_s=60) as client:
        outcomes = await send_all(partial(client.send, "/v1/completions"), bodies, trace.arrivals_s.tolist(), None)
    assert not (errors := [outcome.error for outcome in outcomes if outcome.error]), errors[0]
    after = hits(server)
    ended = max(outcome.sent_at + outcome.e2el_s for outcome in outcomes)
    began = outcomes[0].sent_at - float(trace.arrivals_s[0])
    seconds = {"TTFT": [o.ttft_s for o in outcomes], "E2E": [o.e2el_s for o in outcomes]}
    seconds["TPOT"] = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    itl_ms = 1000 * np.percentile([gap for outcome in outcomes for gap in outcome.itl_s], [50, 99])
    seen = percentiles({name: Latencies.of(np.array(values)) for name, values in seconds.items()})
    seen |= {"ITL p50": itl_ms[0], "ITL p99": itl_ms[1]}
    seen["output tokens/s"] = float(trace.output_tokens.sum()) / (ended - began)
    if not layout.prefill:
        seen["cached, %"] = 100 * (after[0] - before[0]) / (after[1] - before[1])
    return seen


def token_ids(trace: Trace, index: int) -> list[int]:
    """The trace's prompt in ids that the model has: equal pieces stay equal."""
    length = int(trace.prompt_tokens[index])
    pieces = trace.hash_ids[index] if trace.hash_ids else [index * 8 + i for i in range(-(-length // PIECE))]
    ids = [np.random.default_rng([7, piece]).integers(FIRST_ID, VOCABULARY, PIECE) for piece in pieces]
    return [int(token) for token in np.concatenate(ids)[:length]]


def scrape(server: ServeRun) -> Scrape:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=30).text)


def hits(server: ServeRun) -> tuple[float, float]:
    """Prompt tokens found in prefix caches, and looked up."""
    found = scrape(server)
    return found.sum("vllm:prefix_cache_hits_total"), found.sum("vllm:prefix_cache_queries_total")


# -- simulated ---------------------------------------------------------------------------------------------


def simulation(layout: PoolSizes, found: HttpFit, request_s: float, trace: Trace) -> Report:
    """request_s: of a request to one pool. With two, what a request takes beyond that is due to its handoff; the call
    to the prefill replica is as long as that to a decode replica. What the loopback device takes per token of KV is not
    told apart from what computing it takes."""
    way_s = request_s / 2
    spec = ClusterSpec(
        replicas=layout.decode,
        prefill_replicas=layout.prefill,
        engine=CONFIG,
        cost=found.cost,
        contention=found.contention,
        num_blocks=ENGINE["num_gpu_blocks_override"],
        kv_bytes=layout.kv_bytes,
        max_model_len=MAX_MODEL_LEN,
        call_s=way_s,
        token_s=way_s,
        handoff_s=max(0.0, found.request_s - 3 * way_s),
    )
    cluster = SlowCalls(spec, trace, busy_s=found.busy_s)
    cluster.run()
    return cluster.report()


def rate_of(layout: PoolSizes, found: HttpFit, load: float) -> float:
    """Requests per second at which the busier pool computes for so much of the time."""
    low, high = 0.5, 100.0
    for _ in range(8):
        rate = (low + high) / 2
        pools = simulation(layout, found, found.request_s, layout.trace(rate, 0)).pools
        low, high = (low, rate) if max(pool.busy for pool in pools.values()) > load else (rate, high)
    return low


def figures(layout: PoolSizes, report: Report) -> Figures:
    assert report.itl_p50_ms is not None and report.itl_p99_ms is not None
    found = percentiles({"TTFT": report.ttft_ms, "E2E": report.e2e_ms, "TPOT": report.tpot_ms})
    found |= {"ITL p50": report.itl_p50_ms, "ITL p99": report.itl_p99_ms}
    found["output tokens/s"] = report.output_tokens_per_s
    if not layout.prefill:
        found["cached, %"] = 100 * report.hit_rate
    return found


def percentiles(latencies: dict[str, Latencies | None]) -> Figures:
    return {f"{name} {p}": getattr(found, p) for name, found in latencies.items() for p in ("p50", "p90", "p99")}


def show(layout: PoolSizes, found: list[Compared]) -> None:
    print(f"| {layout.name} | " + " | ".join(f"{each.title}: real | simulated | error" for each in found) + " |")
    print("| --- |" + " --- |" * 3 * len(found))
    for name in found[0].real[0]:
        print(f"| {name} | " + " | ".join(each.row(name) for each in found) + " |", flush=True)
