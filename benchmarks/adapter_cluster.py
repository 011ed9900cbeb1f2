"""Hundreds of adapters on a real cluster, by policy of routing: `python -m benchmarks.adapter_cluster`.

A `serve run` for each policy: Pocket in two replicas of 16 slots, and a dynamic folder with 200 adapters of random
weights. Requests name adapters by Zipf's law, and arrive at random, at the same times in every run. Prints how many
were sent to a replica that held their adapter, as the router counts them, and the time to the first token, as clients
see it. Then the same requests again, while other adapters are loaded and unloaded and rank processes are killed; prints
how many failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import get_args

import httpx
import msgspec

from benchmarks.lora import make_adapter
from benchmarks.routing import START_S, scrape
from cluster.arrivals import arrival_times
from cluster.cli.bench.openai_client import OpenAIClient, RequestResult
from deployments.routing.config import PolicyName
from engine.model.config import ModelConfig
from engine.pocket import PATH
from tests.serve.replicas.test_replay import processes
from tests.serve.serve_run import RANK, ServeRun, wait_until

REPLICAS, SLOTS, ADAPTERS, EXPONENT = 2, 16, 200, 1.0
PROMPT, OUTPUT = 64, 32  # tokens
EXTRA = 3  # further adapters, which come and go


def start(folder: Path, adapters: Path, policy: PolicyName) -> ServeRun:
    engine = {
        "device": "cpu", "num_threads": 1, "max_model_len": 512, "num_gpu_blocks_override": 4096, "enable_lora": True,
        "max_loras": SLOTS, "max_cpu_loras": ADAPTERS,
    }  # fmt: skip
    decode = {"num_replicas": REPLICAS, "num_cpus": 0.5, "routing": {"policy": policy}, "stall_timeout_s": 60}
    model = {"name": "pocket", "model": "pocket", "engine": engine, "decode": decode}
    model["lora"] = {"dynamic_folder": str(adapters)}
    return ServeRun(folder, {"models": [model], "ingress": {"allow_runtime_lora_updating": True}})


async def ask_all(url: str, args: argparse.Namespace) -> list[RequestResult]:
    chance = random.Random(args.seed)
    weights = [1 / rank**EXPONENT for rank in range(1, ADAPTERS + 1)]
    names = chance.choices([str(i) for i in range(ADAPTERS)], weights, k=args.requests)
    prompts = [[chance.randrange(100, 4000) for _ in range(PROMPT)] for _ in names]
    async with OpenAIClient(url, None, timeout_s=300) as client:

        async def ask(name: str, prompt: list[int], at_s: float) -> RequestResult:
            await asyncio.sleep(at_s)
            body = {"model": name, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
            return await client.send("/v1/completions", msgspec.json.encode(body))

        times = arrival_times(args.requests, args.rate)
        return await asyncio.gather(*map(ask, names, prompts, times))


def failures(outcomes: list[RequestResult]) -> list[str]:
    return [outcome.error for outcome in outcomes if outcome.error]


@contextmanager
def disturbed(server: ServeRun, extra: list[str], counts: dict[str, int]) -> Iterator[None]:
    """Load, ask and unload further adapters meanwhile, and kill a rank process each time that all replicas are up."""
    ended = Event()

    def post(route: str, **body: object) -> None:
        answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=300)
        counts[route] = counts.get(route, 0) + 1
        if answer.status_code != 200:
            counts[f"{route} failed"] = counts.get(f"{route} failed", 0) + 1

    def change() -> None:
        while not ended.is_set():
            for path in extra:
                name = f"extra-{Path(path).name}"
                post("load_lora_adapter", lora_name=name, lora_path=path)
                post("completions", model=name, prompt="The", max_tokens=4)
                post("unload_lora_adapter", lora_name=name)

    def kill() -> None:
        while not ended.wait(3):
            if scrape(server).sum("manta_up") == REPLICAS and (ranks := processes(server, RANK)):
                ranks[0].kill()
                counts["kills"] = counts.get("kills", 0) + 1
                until = time.monotonic() + START_S
                while not ended.wait(1) and scrape(server).sum("manta_up") == REPLICAS and time.monotonic() < until:
                    pass  # the death is not known yet

    threads = [Thread(target=change), Thread(target=kill)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def run(policy: PolicyName, adapters: Path, extra: list[str], args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = start(Path(folder), adapters, policy)
        try:
            server.wait_until_healthy(REPLICAS)
            wait_until(lambda: scrape(server).sum("manta_up") == REPLICAS, START_S)
            outcomes = asyncio.run(ask_all(server.url, args))
            found, counts = scrape(server), dict[str, int]()
            with disturbed(server, extra, counts):
                beside = failures(asyncio.run(ask_all(server.url, args)))
        finally:
            server.stop()
    held, to_load = (found.sum("manta_routed_adapter_requests_total", adapter=how) for how in ("held", "to_load"))
    ttft = sorted(1000 * outcome.ttft_s for outcome in outcomes if not outcome.error)
    mean, p50, p99 = statistics.mean(ttft), ttft[len(ttft) // 2], ttft[int(0.99 * len(ttft))]
    print(
        f"| `{policy}` | {held / (held + to_load):.1%} | {mean:.0f} ms | {p50:.0f} ms | {p99:.0f} ms | "
        f"{len(failures(outcomes))} of {len(outcomes)} | {len(beside)} of {args.requests} |",
        flush=True,
    )
    print(f"    meanwhile: {counts}", *beside[:3], sep="\n    ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="*", default=["prefix_aware", "round_robin"], choices=get_args(PolicyName))
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| policy | adapter was held | first token, mean | P50 | P99 | failed | failed beside kills |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder, model = Path(made, "adapters"), ModelConfig.from_folder(Path(PATH))
        folder.mkdir()
        for i in range(ADAPTERS):
            make_adapter(folder / str(i), model, args.rank, i)
        extra = [make_adapter(Path(made, str(i)), model, args.rank, ADAPTERS + i).path for i in range(EXTRA)]
        for policy in args.policies:
            run(policy, folder, extra, args)


if __name__ == "__main__":
    main()
