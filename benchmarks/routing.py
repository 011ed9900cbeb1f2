"""Policies of routing side by side: `python -m benchmarks.routing [rounds]`.

Four decode replicas behind one ingress, by a real `serve run` for each policy and round, in turn. Prompts begin with
one of GROUPS prefixes, at random, of which one replica's cache holds about a third; requests arrive at random, at the
same times in every run. Prints the fraction of prompt tokens that were cached, as engines count them, and the time to
the first token, as clients see it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import httpx
import msgspec

from cluster.arrivals import arrival_times
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult
from deployments.routing.config import PolicyName
from tests.scrape import Scrape
from tests.serve.serve_run import ServeRun, wait_until

REPLICAS, REQUESTS, RATE = 4, 160, 2.0
GROUPS, PREFIX, REST, OUTPUT = 16, 640, 32, 8  # tokens
NUM_BLOCKS = 240  # of 16 tokens; all prefixes together are 640
START_S = 400.0


@dataclass(frozen=True, slots=True)
class Result:
    hit_rate: float
    ttft_s: list[float]
    drift: float  #: error of the router's estimates, as a fraction of the cached tokens


def prompts() -> list[list[int]]:
    chance = random.Random(0)
    prefixes = [[chance.randrange(100, 4000) for _ in range(PREFIX)] for _ in range(GROUPS)]
    return [chance.choice(prefixes) + [chance.randrange(100, 4000) for _ in range(REST)] for _ in range(REQUESTS)]


async def ask_all(url: str) -> list[RequestResult]:
    async with OpenAIClient(url, None, timeout_s=300) as client:

        async def ask(prompt: list[int], at_s: float) -> RequestResult:
            await asyncio.sleep(at_s)
            body = {"model": "pocket", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
            return await client.send("/v1/completions", msgspec.json.encode(body))

        times = arrival_times(REQUESTS, RATE)
        return await asyncio.gather(*(ask(prompt, at_s) for prompt, at_s in zip(prompts(), times, strict=True)))


def run(policy: PolicyName) -> Result:
    engine = {"device": "cpu", "num_threads": 1, "num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": 1024}
    decode = {"num_replicas": REPLICAS, "num_cpus": 0.25, "routing": {"policy": policy}, "stall_timeout_s": 60}
    model = {"name": "pocket", "model": "pocket", "engine": engine, "decode": decode}
    with tempfile.TemporaryDirectory() as folder, ServeRun(Path(folder), {"models": [model]}) as server:
        for _ in range(REPLICAS):
            server.wait_for_line("replica ready", timeout_s=START_S)
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, START_S)
        wait_until(lambda: scrape(server).sum("manta_up") == REPLICAS, START_S)
        outcomes = asyncio.run(ask_all(server.url))
        errors = [outcome.error for outcome in outcomes if outcome.error]
        assert not errors, f"{len(errors)} requests failed: {errors[0]}"
        found = scrape(server)
    hits, queries = (found.sum(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    cached = found.sum("manta_routing_cached_tokens_total")
    drift = found.sum("manta_routing_drift_tokens_total") / max(cached, 1)
    return Result(hits / queries, sorted(outcome.ttft_s for outcome in outcomes), drift)


def scrape(server: ServeRun) -> Scrape:
    answer = httpx.get(f"{server.url}/metrics", timeout=30)
    assert answer.status_code == 200
    return Scrape(answer.text)


def main(rounds: int) -> None:
    results: dict[PolicyName, list[Result]] = {policy: [] for policy in get_args(PolicyName)}
    for number in range(rounds):
        for policy, of_policy in results.items():
            of_policy.append(result := run(policy))
            print(f"round {number + 1}: {line(policy, [result])}", flush=True)
    print("\n| policy | cached | TTFT p50 | p90 | p99 | mean | drift |\n| --- | --- | --- | --- | --- | --- | --- |")
    for policy, of_policy in results.items():
        print(line(policy, of_policy))


def line(policy: str, results: list[Result]) -> str:
    """Describe all runs of one policy together."""
    ttft_ms = sorted(seconds * 1000 for result in results for seconds in result.ttft_s)
    p50, p90, p99 = (ttft_ms[int(fraction * len(ttft_ms))] for fraction in (0.5, 0.9, 0.99))
    cached = statistics.mean(result.hit_rate for result in results)
    drift = statistics.mean(result.drift for result in results)
    mean = statistics.mean(ttft_ms)
    return f"| `{policy}` | {cached:.1%} | {p50:.0f} ms | {p90:.0f} ms | {p99:.0f} ms | {mean:.0f} ms | {drift:.1%} |"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
