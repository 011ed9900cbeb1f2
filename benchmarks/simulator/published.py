"""Ratios that others have published, from the same experiments in the simulator; and a run of a thousand replicas."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from cluster.config.simulation_options import RouterName
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.cost_model import CARDS, MODELS, CostModel, kv_tokens, roofline
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from cluster.lab.simulator.trace import make_trace, shared_prefix
from engine.config import EngineConfig

NO_LIMIT = 10**9
BLOCK = 16


def prefix_groups(router: RouterName, groups: int = 64) -> Report:
    """Groups of 16 prompts: 2,048 tokens in common, 128 of their own, 256 out, all at once, on 8 A100s."""
    model, card = MODELS["llama-3.1-8b"], CARDS["a100"]
    arrivals = np.linspace(0, 16 * groups * 1e-6, 16 * groups, endpoint=False)
    rng = np.random.default_rng(1)
    trace = shared_prefix(arrivals, rng, groups=groups, system=2048, question=128, output=256, turns=16)
    config = EngineConfig(block_size=BLOCK, max_num_batched_tokens=8192, max_num_seqs=256, max_waiting=NO_LIMIT)
    blocks = kv_tokens(model, card) // BLOCK
    cost = roofline(model, card)
    return simulate(ClusterSpec(replicas=8, engine=config, cost=cost, num_blocks=blocks, router=router), trace)


def routing() -> None:
    reports = {}
    routers: tuple[RouterName, ...] = ("random", "round_robin", "power_of_two", "prefix_aware")
    for router in routers:
        reports[router] = report = prefix_groups(router)
        tokens = report.requests_per_s * (2048 + 128 + 256)
        print(f"{router:14}{tokens:10.0f} tokens/s, hit rate {report.hit_rate:.0%}", flush=True)
    print(f"ratio {reports['prefix_aware'].requests_per_s / reports['random'].requests_per_s:.2f}")


STRICT = GoodputSlo(ttft_s=0.4, tpot_s=0.04, fraction=0.9)
DATA_SHEET = roofline(MODELS["opt-13b"], CARDS["a100"])
# fitted to the paper's two figures of one phase alone: 5.6 prefills per second, and 10 requests that only decode
ENGINE_OF_2023 = replace(DATA_SHEET, step_s=0.016, token_s=0.00017)


def goodput(cost: CostModel, decode: int, prefill: int, chunk: int, slo: GoodputSlo, *, requests: int = 800) -> float:
    """Requests per second that the cluster takes while 90% keep the SLO: OPT-13B on A100s, 512 tokens in, 64 out."""
    model, card = MODELS["opt-13b"], CARDS["a100"]

    def keeps(rate: float) -> bool:
        config = EngineConfig(block_size=BLOCK, max_num_batched_tokens=chunk, max_num_seqs=256, max_waiting=NO_LIMIT)
        blocks = kv_tokens(model, card) // BLOCK
        spec = ClusterSpec(
            replicas=decode,
            prefill_replicas=prefill,
            engine=config,
            prefill_engine=replace(config, max_num_batched_tokens=8192),
            cost=cost,
            num_blocks=blocks,
            router="round_robin",
            kv_bytes=model.kv_bytes,
            max_model_len=16_384,
            slo=slo,
        )
        return simulate(spec, make_trace("fixed", requests, rate)).good >= slo.fraction

    low, high = 0.0, 1.0
    while keeps(high):
        low, high = high, 2 * high
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def split() -> None:
    """Measure with the cost of the paper's engine, fitted to its two figures of one phase alone, and with that by the
    data sheet."""
    for name, cost in (("engine of 2023", ENGINE_OF_2023), ("data sheet", DATA_SHEET)):
        alone = (
            goodput(cost, 8, 1, 8192, replace(STRICT, tpot_s=9.0)),
            goodput(cost, 1, 8, 8192, replace(STRICT, ttft_s=9)),
        )
        print(f"{name}: prefill alone {alone[0]:.2f}, decode alone {alone[1]:.2f}", flush=True)
        whole, chunks = goodput(cost, 1, 0, 8192, STRICT), goodput(cost, 1, 0, 256, STRICT)
        two = goodput(cost, 1, 2, 8192, STRICT) / 3
        print(f"  per GPU: whole prompts {whole:.2f}, chunks of 256 {chunks:.2f}, 2 prefill + 1 decode {two:.2f}")
        print(f"  two pools gain {two / whole:.2f} over whole prompts, {two / chunks:.2f} over chunks", flush=True)


def scale() -> None:
    model, card = MODELS["llama-3.1-8b"], CARDS["h100"]
    config = EngineConfig(block_size=64, max_num_batched_tokens=2048, max_num_seqs=256, max_waiting=NO_LIMIT)
    spec = ClusterSpec(
        replicas=1000,
        engine=config,
        cost=roofline(model, card),
        num_blocks=kv_tokens(model, card) // 64,
        router="power_of_two",
        max_model_len=32_768,
    )
    trace = make_trace("azure-conversation", 1_000_000, 5000.0)
    started, cpu = time.perf_counter(), time.process_time()
    report = simulate(spec, trace)
    print(f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU", report, flush=True)
