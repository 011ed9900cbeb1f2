"""Models whose layers differ in what they keep, in the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.cost_model import CARDS, LayerKind, Layers, Work, differs, find_model
from cluster.lab.simulator.kv_layers import KVLayers, divide
from cluster.lab.simulator.trace import Trace
from engine.wire.plan import StepPlan
from tests.cluster.lab.simulator.small_cluster import FULL, WINDOW, small_cluster, small_engine
from tests.models import make_model


def run(layers: KVLayers, trace: Trace) -> Cluster:
    cluster = Cluster(replace(small_cluster(replicas=1), kv_layers=layers), trace)
    cluster.run()
    return cluster


def preemptions(cluster: Cluster) -> int:
    return sum(replica.scheduler.totals.preemptions for replica in cluster.pools["decode"].replicas)


def test_layers_with_a_window_need_few_blocks():
    trace = Trace("long", np.zeros(6), np.full(6, 600), np.full(6, 300))
    windowed, whole = (
        run(KVLayers(specs=(FULL, other), blocks=(400, 120), step_tokens=512), trace) for other in (WINDOW, FULL)
    )
    assert np.isfinite(windowed.results.last_at).all() and np.isfinite(whole.results.last_at).all()
    assert preemptions(windowed) == 0 < preemptions(whole)


def test_a_prefix_of_a_model_with_states_is_cached_up_to_a_snapshot():
    trace = Trace("twice", np.array([0.0, 100.0]), np.full(2, 1000), np.full(2, 5), [[0, 1], [0, 1]])
    layers = KVLayers(specs=(FULL,), blocks=(400,), step_tokens=512, snapshots=20, snapshot_tokens=64)
    assert run(layers, trace).results.cached.tolist() == [0, 960]
    assert run(replace(layers, snapshots=0), trace).results.cached.tolist() == [0, 992]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_memory_is_divided_as_an_engine_does(tmp_path: Path, family: str):
    model = find_model(str(make_model(tmp_path, family)))
    assert model.config is not None
    assert differs(model.config) == (family != "llama")
    engine = small_engine(num_gpu_blocks_override=64)
    layers, longest = divide(model, CARDS["l4"], 1, engine)
    assert layers.blocks[0] == 64 and longest == 512
    assert len(layers.specs) == (2 if family == "gemma3" else 1)
    assert (layers.snapshots > 0) == (family == "qwen3_5")


@given(window=st.integers(1, 30), start=st.integers(0, 60), count=st.integers(1, 40))
def test_a_window_bounds_what_is_attended_to_and_read(window, start, count):
    seen = [range(max(0, position - window + 1), position + 1) for position in range(start, start + count)]
    assert LayerKind(window, 1.0, 1.0).seen(start, count) == (sum(map(len, seen)), len(set().union(*seen)))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_step_reads_windows_and_states_where_a_model_has_them(tmp_path: Path, family: str):
    model = find_model(str(make_model(tmp_path, family)))
    assert model.config is not None
    layers = Layers.of(model.config)
    assert sum(kind.kv for kind in layers.kinds) == sum(kind.pairs for kind in layers.kinds) == pytest.approx(1.0)
    assert layers.alike == (family == "llama")
    plan = StepPlan(1, [], [], slots=[0], starts=[200], counts=[1], samples=[True])
    pairs, context = Work.of(plan, layers)[2:]
    if family == "gemma3":  # a window of 8 in four of six layers
        assert pairs == context == pytest.approx((2 * 201 + 4 * 8) / 6)
    else:
        assert pairs == 201 and (context > 201) == (family == "qwen3_5")


def test_a_handoff_reads_windows_and_a_snapshot_at_its_end():
    layers = Layers((LayerKind(None, 0.5, 0.25), LayerKind(100, 0.5, 0.75)), state=70.0, snapshot=60.0)
    assert layers.handed_over(64, 320, skip=64, end=1000) == 0.25 * 256
    assert layers.handed_over(320, 1000, skip=64, end=1000) == 0.25 * 680 + 0.75 * 99 + 60.0
    assert layers.handed_over(960, 1000, skip=960, end=1000) == 0.25 * 40 + 0.75 * 40 + 60.0
    assert Layers().handed_over(64, 320, skip=64, end=1000) == 256
