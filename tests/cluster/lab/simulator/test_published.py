"""Ratios that others have published, from small runs of the same experiments (docs/simulator.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulator.published import ENGINE_OF_2023, STRICT, goodput, prefix_groups
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.cost_model import CARDS, MODELS, kv_tokens, roofline
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from cluster.lab.simulator.trace import Trace, make_trace
from engine.config import EngineConfig

SHEET = roofline(MODELS["opt-13b"], CARDS["a100"])


@pytest.mark.slow
def test_routing_by_prefix_gains_what_sglang_has_published():
    """1.9 times the throughput of random routing, on a saturated cluster."""
    throughput = {router: prefix_groups(router, groups=32) for router in ("random", "prefix_aware")}
    gain = throughput["prefix_aware"].requests_per_s / throughput["random"].requests_per_s
    assert 1.4 < gain < 2.2
    assert throughput["prefix_aware"].hit_rate > 1.4 * throughput["random"].hit_rate


@pytest.mark.slow
def test_two_pools_gain_what_distserve_has_published():
    """2.1 times the goodput per GPU of whole prompts in one pool: 3.3 against 1.6 requests per second."""
    one, two = goodput(ENGINE_OF_2023, 1, 0, 8192, STRICT), goodput(ENGINE_OF_2023, 1, 2, 8192, STRICT) / 3
    assert one == pytest.approx(1.6, rel=0.3)
    assert two == pytest.approx(3.3, rel=0.15)
    assert 1.8 < two / one < 2.8


@pytest.mark.slow
def test_chunks_take_back_most_of_what_two_pools_gain():
    whole, chunks = goodput(SHEET, 1, 0, 8192, STRICT), goodput(SHEET, 1, 0, 256, STRICT)
    assert chunks > 1.3 * whole
    assert goodput(SHEET, 1, 2, 8192, STRICT) / 3 < chunks  # with an engine of today they lose


def cluster(prefill: int, decode: int, slo: GoodputSlo, network: float = 25e9) -> ClusterSpec:
    model, card = MODELS["llama-3.1-8b"], CARDS["h100"]
    config = EngineConfig(block_size=64, max_num_batched_tokens=512, max_waiting=10**9)
    blocks = kv_tokens(model, card) // 64
    return ClusterSpec(
        replicas=decode,
        prefill_replicas=prefill,
        engine=config,
        cost=roofline(model, card),
        num_blocks=blocks,
        router="round_robin",
        kv_bytes=model.kv_bytes,
        bytes_per_s=network,
        slo=slo,
    )


def compared(trace: Trace, slo: GoodputSlo, prefill: int, network: float = 25e9) -> tuple[float, float]:
    """Share of good requests: four replicas for everything, and some of them for prompts only."""
    split = cluster(prefill, 4 - prefill, slo, network)
    return simulate(cluster(0, 4, slo), trace).good, simulate(split, trace).good


def test_two_pools_win_where_long_prompts_meet_a_strict_time_per_token():
    trace = make_trace("azure-conversation", 250, 16.0)
    trace = replace(trace, prompt_tokens=3 * trace.prompt_tokens)
    one, two = compared(trace, GoodputSlo(ttft_s=2.0, tpot_s=0.0118), prefill=2)
    assert two > one + 0.2


def test_two_pools_lose_where_prompts_are_most_of_the_work_and_the_split_is_wrong():
    """Code: 2,048 tokens in, 28 out. Three quarters of the cluster have next to nothing to do."""
    one, two = compared(make_trace("azure-code", 400, 24.0), GoodputSlo(ttft_s=0.5, tpot_s=0.05), prefill=1)
    assert one > two + 0.2


@pytest.mark.slow
def test_two_pools_lose_behind_a_slow_link():
    trace = make_trace("azure-conversation", 300, 10.0)
    one, two = compared(trace, GoodputSlo(ttft_s=0.5, tpot_s=0.05), prefill=1, network=1.25e9 / 2)
    assert one > two + 0.2
