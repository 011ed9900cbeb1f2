"""Models whose layers differ in what they keep, in the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.simulator.cluster import Cluster
from cluster.simulator.cost_model import CARDS, find_model
from cluster.simulator.kv_layers import KVLayers, differs, divide
from cluster.simulator.trace import Trace
from tests.cluster.simulator.small_cluster import FULL, WINDOW, small_cluster, small_engine
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
    engine = small_engine(num_blocks=64)
    layers, longest = divide(model, CARDS["l4"], 1, engine)
    assert layers.blocks[0] == 64 and longest == 512
    assert len(layers.specs) == (2 if family == "gemma3" else 1)
    assert (layers.snapshots > 0) == (family == "qwen3_5")
