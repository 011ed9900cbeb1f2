from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.autoscaling.slo import Limits
from cluster.lab.simulator.cluster import Cluster, simulate
from cluster.lab.simulator.spec import ClusterSpec, GoodputSlo
from cluster.lab.simulator.trace import Trace, make_trace, shared_prefix
from engine.errors import PromptTooLong
from tests.cluster.lab.simulator.small_cluster import MODEL, small_cluster, small_engine


def one_request(prompt: int = 100, output: int = 5) -> Trace:
    return Trace("one", np.array([1.0]), np.array([prompt]), np.array([output]))


def test_a_single_request_takes_the_sum_of_its_steps():
    spec = small_cluster(replicas=1)
    cluster = Cluster(spec, one_request())
    cluster.run()
    seconds = spec.cost.seconds
    prefill = seconds(100, 1, 100 * 101 // 2, 100)
    decode = sum(seconds(1, 1, n, n) for n in range(101, 105))
    assert cluster.results.first_at[0] == pytest.approx(1 + spec.call_s + prefill + spec.token_s)
    assert cluster.results.last_at[0] == pytest.approx(cluster.results.first_at[0] + decode)


def test_a_long_prompt_is_computed_in_chunks():
    steps = [
        simulate(small_cluster(replicas=1, max_num_batched_tokens=n), one_request(500, 1)).pools["decode"].steps
        for n in (512, 100)
    ]
    assert steps == [1, 5]


@pytest.mark.parametrize("router", ["random", "round_robin", "power_of_two", "prefix_aware"])
@pytest.mark.parametrize("prefill", [0, 2])
def test_every_request_ends_whatever_the_router(router, prefill):
    trace = make_trace("shared-prefix", 60, 20.0)
    report = simulate(small_cluster(prefill, router=router, num_blocks=600), trace)
    assert (report.completed, report.refused) == (60, 0)
    assert (report.handoffs is None) == (prefill == 0)
    if report.handoffs is not None:
        assert report.handoffs.count == 60


def test_replicas_that_share_cores_slow_each_other_down():
    spec = small_cluster(replicas=2, router="round_robin")
    pair = Trace("pair", np.array([1.0, 1.0]), np.array([100, 100]), np.array([40, 40]))
    shares = replace(spec, contention=0.5)
    alone, shared, apart = simulate(shares, one_request(100, 40)), simulate(shares, pair), simulate(spec, pair)
    assert alone.itl_p50_ms == apart.itl_p50_ms is not None
    assert shared.itl_p50_ms == pytest.approx(1.5 * apart.itl_p50_ms, rel=0.02)


def test_equal_seeds_give_equal_results():
    spec, trace = small_cluster(1, router="power_of_two"), make_trace("azure-conversation", 40, 10.0).first(40)
    spec = replace(spec, max_model_len=20_000, num_blocks=1500)
    one, again = (replace(simulate(spec, trace), took_s=0.0) for _ in range(2))
    assert one == again


def test_what_is_handed_over_is_counted_in_bytes_and_takes_the_links_time():
    trace = one_request(prompt=400, output=3)
    fast, slow = (simulate(replace(small_cluster(1), bytes_per_s=rate), trace) for rate in (1e12, 1e8))
    assert fast.handoffs and slow.handoffs and fast.ttft_ms and slow.ttft_ms
    num_bytes = 400 * MODEL.kv_bytes
    assert fast.handoffs.gigabytes == pytest.approx(num_bytes / 1e9)
    assert slow.ttft_ms.mean - fast.ttft_ms.mean == pytest.approx(1000 * num_bytes * (1 / 1e8 - 1 / 1e12), rel=0.01)


def test_kv_travels_while_the_next_chunk_is_computed():
    """Ten chunks: all but the last one's bytes hide behind computing."""
    spec = replace(small_cluster(1, max_num_batched_tokens=160), bytes_per_s=20e9)
    whole = replace(spec, prefill_engine=small_engine(max_num_batched_tokens=1600))
    trace = one_request(prompt=1600, output=2)
    chunked, at_once = (simulate(s, trace).ttft_ms for s in (spec, whole))
    assert chunked and at_once
    transfer_ms = 1000 * 1600 * MODEL.kv_bytes / 20e9
    compute = spec.cost.seconds
    chunks_ms = 1000 * sum(compute(160, 1, 160 * s + 160 * 161 // 2, s + 160) for s in range(0, 1600, 160))
    at_once_ms = 1000 * compute(1600, 1, 1600 * 1601 // 2, 1600)
    other_ms = at_once.mean - at_once_ms - transfer_ms
    assert chunked.mean == pytest.approx(chunks_ms + transfer_ms / 10 + other_ms, rel=0.01)


def test_the_engines_own_weighing_keeps_short_prompts_where_they_are():
    spec = replace(small_cluster(1, replicas=1), handoff="auto")
    trace = Trace("short", np.arange(1, 30) * 0.2, np.full(29, 20), np.full(29, 4))
    report = simulate(spec, trace)
    assert report.completed == 29
    assert report.handoffs is not None
    assert report.handoffs.count < 10  # before it knows any prefill engine it sends all


def test_a_full_ingress_refuses_and_says_how_many():
    spec = replace(small_cluster(replicas=1, max_num_seqs=1), max_waiting=3)
    report = simulate(spec, Trace("burst", np.zeros(20), np.full(20, 50), np.full(20, 5)))
    assert report.refused == 20 - 3 - 2  # three wait in the ingress, the engine takes one and one more
    assert report.completed == 5
    assert report.good == pytest.approx(5 / 20)


def test_requests_that_are_too_long_for_the_cluster_are_an_error():
    with pytest.raises(PromptTooLong):
        simulate(small_cluster(num_blocks=10), one_request(prompt=160))


def test_prefixes_are_found_again_only_where_they_were_computed():
    trace = shared_prefix(
        np.arange(1, 41) * 1.0, np.random.default_rng(0), groups=2, system=1024, question=64, output=4, turns=20
    )
    rates = {
        router: simulate(small_cluster(replicas=4, router=router), trace).hit_rate
        for router in ("random", "prefix_aware")
    }
    # two misses of forty, against one per group and replica
    assert rates["prefix_aware"] == pytest.approx(38 / 40 * 1024 / 1088, rel=0.03)
    assert rates["random"] < rates["prefix_aware"] - 0.05


def scaling_cluster(max_replicas: int) -> ClusterSpec:
    limits = Limits(
        min_replicas=1,
        max_replicas=max_replicas,
        max_num_seqs=8,
        upscale_delay_s=1.0,
        downscale_delay_s=20.0,
        scale_to_zero_delay_s=float("inf"),
    )
    spec = small_cluster(replicas=1, router="round_robin")
    return replace(spec, slo=GoodputSlo(ttft_s=1.0, tpot_s=0.05), limits=limits, startup_s=5.0)


def test_the_autoscaler_brings_replicas_for_a_rush_and_takes_them_back():
    rush, calm = np.arange(400) * 0.02, 20 + np.arange(60) * 2.0
    arrivals = np.concatenate([rush, calm])
    trace = Trace("rush", arrivals, np.full(len(arrivals), 200), np.full(len(arrivals), 40))
    cluster = Cluster(scaling_cluster(6), trace)
    cluster.run()
    wanted = cluster.pools["decode"].desired
    assert wanted[0] == 1 and max(wanted) > 1
    assert wanted[-1] < max(wanted)
    report = cluster.report()
    assert report.completed == len(trace)
    assert len(cluster.pools["decode"].up) == wanted[-1]
    scaled = report.pools["decode"].scaled
    assert scaled is not None
    assert (scaled.min, scaled.max, scaled.wanted) == (1, max(wanted), max(wanted))
    assert 1 < scaled.mean <= 3600 * report.pools["decode"].gpu_hours / report.duration_s  # that drain are paid for too
    most_hours = max(wanted) * report.duration_s / 3600
    assert report.duration_s / 3600 < report.pools["decode"].gpu_hours < most_hours


def test_replicas_that_were_wanted_but_never_up_are_told():
    arrivals = np.arange(100) * 0.02
    trace = Trace("short", arrivals, np.full(100, 200), np.full(100, 40))
    report = simulate(replace(scaling_cluster(6), startup_s=1000.0), trace)
    scaled = report.pools["decode"].scaled
    assert scaled is not None
    assert (scaled.min, scaled.max, scaled.mean) == (1, 1, pytest.approx(1.0))
    assert scaled.wanted > 1
    assert simulate(small_cluster(), trace).pools["decode"].scaled is None


def turning_load() -> Trace:
    """Long prompts, then long answers, then long prompts: in each third another pool is short of replicas."""
    arrivals, prompts, outputs = [], [], []
    for begin, rate, prompt, output in ((0, 16, 4000, 4), (60, 6, 64, 400), (120, 16, 4000, 4)):
        arrivals += [begin + i / rate for i in range(60 * rate)]
        prompts += [prompt] * (60 * rate)
        outputs += [output] * (60 * rate)
    return Trace("turning", np.array(arrivals), np.array(prompts), np.array(outputs))


@pytest.mark.slow
def test_replicas_change_roles_as_the_load_turns_and_every_request_ends_once():
    spec = replace(
        small_cluster(1, replicas=3, num_blocks=2000, router="prefix_aware", max_num_batched_tokens=2048),
        slo=GoodputSlo(ttft_s=1.0, tpot_s=0.05),
        switch_roles=True,
        limits=replace(scaling_cluster(4).limits, max_replicas=4),
    )
    cluster = Cluster(spec, turning_load())
    cluster.run()
    report = cluster.report()
    assert report.completed == report.requests
    sizes = report.pools["prefill"].scaled
    assert sizes is not None and sizes.max > sizes.min
    assert sum(len(pool.up) for pool in cluster.pools.values()) == 4
    for pool in cluster.pools.values():
        for replica in pool.replicas:
            replica.scheduler.check()
            assert replica.scheduler.kv_cache.pool.num_used == 0
    fixed = simulate(replace(spec, switch_roles=False, limits=None), turning_load())
    assert report.good > fixed.good
