"""Many steps at once against the oracle: the same cluster, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.kv_layers import KVLayers
from cluster.lab.simulator.spec import ClusterSpec, TierSpec
from cluster.lab.simulator.trace import PIECE, Trace
from tests.cluster.lab.simulator.small_cluster import FULL, WINDOW, small_cluster


@st.composite
def traces(draw):
    size = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.003, 0.02, 0.1, 1.0]), min_size=size, max_size=size))
    prompts = draw(st.lists(st.integers(1, 1500), min_size=size, max_size=size))
    outputs = draw(st.lists(st.integers(1, 60), min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    ids = [
        [groups[i] if piece == 0 else 10 + 10 * i + piece for piece in range(-(-prompts[i] // PIECE))]
        for i in range(size)
    ]
    return Trace("drawn", np.cumsum(gaps), np.array(prompts), np.array(outputs), ids)


LAYERS = [
    KVLayers(specs=(FULL, WINDOW), blocks=(3000, 3000), step_tokens=512),
    KVLayers(specs=(WINDOW,), blocks=(3000,), step_tokens=512),
    KVLayers(specs=(FULL,), blocks=(3000,), step_tokens=512, snapshots=500, snapshot_tokens=64, snapshot_interval=256),
]
specs = st.builds(
    small_cluster,
    prefill=st.sampled_from([0, 0, 1]),
    replicas=st.integers(1, 2),
    num_blocks=st.sampled_from([100, 130, 400]),
    tiers=st.lists(
        st.builds(
            TierSpec,
            st.sampled_from(["host", "disk", "store"]),
            st.sampled_from([50, 1000]),
            st.sampled_from([1e9, 25e9]),
        ),
        max_size=2,
        unique_by=lambda tier: tier.name,
    ).map(lambda tiers: sorted(tiers, key=lambda tier: tier.name != "host")),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    max_num_batched_tokens=st.sampled_from([64, 512]),
    enable_prefix_caching=st.booleans(),
    router=st.sampled_from(["random", "round_robin"]),
)


@settings(max_examples=25)
@given(spec=specs, trace=traces(), fast_forward=st.sampled_from([1, 5, 64]))
def test_fast_forward_gives_the_same_times_and_the_same_caches_as_single_steps(spec, trace, fast_forward):
    assert_equal(run(spec, trace, fast_forward), run(spec, trace, 0))


def test_fast_forward_ends_the_warm_up_after_as_many_steps_in_which_costs_are_not_learned():
    tier = TierSpec(name="host", blocks=50, bytes_per_s=1e9)
    spec = small_cluster(num_blocks=100, tiers=[tier], max_num_seqs=1, router="round_robin")
    prompts, outputs = np.ones(17, dtype=int), np.ones(17, dtype=int)
    prompts[[0, 2, 4, 8]], outputs[[0, 2]] = [301, 1272, 161, 193], [20, 10]
    ids = [[2] if i in (0, 4, 8) else [0] for i in range(17)]
    ids[2] = [0, 31, 32]
    trace = Trace("found", np.minimum(np.arange(17) // 2, 1).astype(float), prompts, outputs, ids)
    assert_equal(run(spec, trace, 1), run(spec, trace, 0))


def test_fast_forward_is_exact_where_requests_preempt_each_other():
    trace = Trace("tight", np.arange(12) * 0.01, np.full(12, 300), np.full(12, 150))
    slow, fast = (run(small_cluster(num_blocks=60), trace, fast_forward) for fast_forward in (0, 64))
    assert_equal(fast, slow)
    assert sum(r.scheduler.totals.preemptions for r in fast.pools["decode"].replicas) > 0


@settings(max_examples=10)
@given(trace=traces(), layers=st.sampled_from(LAYERS), prefill=st.sampled_from([0, 1]))
def test_fast_forward_is_exact_with_windows_and_states_where_nothing_is_evicted(trace, layers, prefill):
    spec = replace(small_cluster(prefill, num_blocks=3000), kv_layers=layers)
    slow, fast = (run(spec, trace, fast_forward) for fast_forward in (0, 64))
    assert_equal(fast, slow)


@pytest.mark.parametrize("prefill", [0, 1])
def test_fast_forward_takes_far_fewer_turns_than_steps(prefill):
    trace = Trace("long", np.zeros(4), np.full(4, 100), np.full(4, 400))
    cluster = run(small_cluster(prefill), trace, 64)
    steps = sum(r.scheduler.totals.steps for r in cluster.pools["decode"].replicas)
    assert steps >= 2 * 399
    assert cluster.turns < steps / 5


def run(spec: ClusterSpec, trace: Trace, fast_forward: int) -> Cluster:
    cluster = Cluster(spec, trace, fast_forward=fast_forward)
    cluster.run()
    for pool in cluster.pools.values():
        for replica in pool.replicas:
            replica.scheduler.check()
    return cluster


def assert_equal(one: Cluster, other: Cluster) -> None:
    for name in ("first_at", "last_at", "cached"):
        assert np.array_equal(getattr(one.results, name), getattr(other.results, name)), name
    for role, pool in one.pools.items():
        for a, b in zip(pool.replicas, other.pools[role].replicas, strict=True):
            assert a.scheduler.totals == b.scheduler.totals
            assert a.itl == b.itl
            assert a.busy_s == pytest.approx(b.busy_s)
            assert set(a.scheduler.kv_cache.pool.block_hashes()) == set(b.scheduler.kv_cache.pool.block_hashes())
