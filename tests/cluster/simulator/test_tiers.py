"""Host memory below the KV caches of simulated replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.simulator.cluster import Cluster, simulate
from cluster.simulator.options import SimulationOptions
from cluster.simulator.spec import ClusterSpec, find_trace, make_cluster
from cluster.simulator.trace import PIECE, Trace
from engine.errors import InvalidParameter
from tests.cluster.simulator.small_cluster import BLOCK, MODEL, small_cluster
from tests.models import make_model

PROMPT = 3 * PIECE
CACHE = 130  # blocks, in which one prompt fits, and not two


def talks(*order: int) -> Trace:
    """A prompt of each of these conversations, a second apart. One conversation asks the same each time."""
    size = len(order)
    ids = [[10 * talk + piece for piece in range(3)] for talk in order]
    return Trace("talks", np.arange(size) * 1.0, np.full(size, PROMPT), np.full(size, 4), ids)


def run(spec: ClusterSpec, trace: Trace) -> Cluster:
    cluster = Cluster(spec, trace)
    cluster.run()
    for replica in cluster.pools["decode"].replicas:
        replica.scheduler.check()
    return cluster


def spec(host_blocks: int) -> ClusterSpec:
    return small_cluster(replicas=1, num_blocks=CACHE, host_blocks=host_blocks)


def test_a_prompt_that_the_cache_has_evicted_comes_back_from_host_memory():
    trace = talks(0, 1, 2, 0)
    without, with_tier = run(spec(0), trace), run(spec(1000), trace)
    assert without.results.cached.tolist() == [0, 0, 0, 0]
    assert without.report().tiers is None
    loaded = (PROMPT - 1) // BLOCK * BLOCK
    assert with_tier.results.cached.tolist() == [0, 0, 0, loaded]
    tiers = with_tier.report().tiers
    assert tiers is not None and tiers.loaded_tokens == loaded
    assert tiers.gigabytes_loaded == pytest.approx(loaded * MODEL.kv_bytes / 1e9)
    assert tiers.gigabytes_stored >= 3 * tiers.gigabytes_loaded
    first_token = [cluster.results.first_at[3] for cluster in (without, with_tier)]
    assert first_token[1] < first_token[0]


def test_a_load_takes_as_long_as_its_bytes():
    trace = talks(0, 1, 2, 0)
    fast, slow = (run(replace(spec(1000), host_bytes_per_s=rate), trace) for rate in (50e9, 5e9))
    num_bytes = (PROMPT - 1) // BLOCK * BLOCK * MODEL.kv_bytes
    later_s = slow.results.first_at[3] - fast.results.first_at[3]
    assert later_s == pytest.approx(num_bytes * (1 / 5e9 - 1 / 50e9), rel=0.01)


def test_an_engine_learns_that_loading_takes_longer_than_computing():
    trace = talks(0, 1, 2, 0, 1, 2, 0, 1, 2)
    slow = run(replace(spec(1000), host_bytes_per_s=2e9), trace)
    assert slow.results.cached[3] > 0, "nothing is known of the tier yet"
    assert slow.results.cached[4:].tolist() == [0] * 5


def test_host_memory_keeps_no_more_than_fits():
    trace = talks(0, 1, 2, 3, 4, 0, 4)
    cached = run(spec(2 * CACHE), trace).results.cached
    assert cached[5] == 0 and cached[6] > 0


def test_the_size_is_given_in_gib_for_one_replica():
    options = SimulationOptions(model="llama-3.1-8b", block_size=16, requests=10, kv_offloading_size=1.0)
    made = make_cluster(options, find_trace(options))
    assert made.host_blocks == 2**30 // int(MODEL.kv_bytes * 16)
    assert simulate(made, find_trace(options)).tiers is not None


@pytest.mark.parametrize("size", [0.0, -1.0, float("inf"), 1e-9])
def test_a_size_without_room_for_a_block_is_refused(size):
    options = SimulationOptions(requests=10, kv_offloading_size=size)
    with pytest.raises(InvalidParameter, match="--kv-offloading-size"):
        make_cluster(options, find_trace(options))


def test_a_model_whose_layers_keep_different_tokens_is_refused(tmp_path):
    options = SimulationOptions(model=str(make_model(tmp_path, "gemma3")), requests=10, kv_offloading_size=1.0)
    trace = Trace("short", np.array([1.0]), np.array([30]), np.array([5]))
    with pytest.raises(InvalidParameter, match="cannot offload"):
        make_cluster(options, trace)
