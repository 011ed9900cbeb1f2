"""Tiers below the KV caches of simulated replicas."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.config.simulation_options import SimulationOptions
from cluster.lab.simulator.cluster import Cluster, simulate
from cluster.lab.simulator.spec import ClusterSpec, TierSpec, find_trace, make_cluster
from cluster.lab.simulator.trace import PIECE, Trace
from engine.errors import InvalidParameter
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from tests.cluster.lab.simulator.small_cluster import BLOCK, MODEL, small_cluster
from tests.models import make_model

PROMPT = 3 * PIECE
CACHE = 130  # blocks, in which one prompt fits, and not two
NAMES = pytest.mark.parametrize("name", ["host", "disk", "store"])


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


def spec(*tiers: TierSpec, replicas: int = 1) -> ClusterSpec:
    return small_cluster(replicas=replicas, num_blocks=CACHE, tiers=tiers, router="round_robin")


def tier(name: str, blocks: int = 1000, bytes_per_s: float = 25e9) -> TierSpec:
    return TierSpec(name, blocks, bytes_per_s)  # type: ignore[arg-type]


LOADED = (PROMPT - 1) // BLOCK * BLOCK


@NAMES
def test_a_prompt_that_the_cache_has_evicted_comes_back_from_its_tier(name):
    trace = talks(0, 1, 2, 0)
    without, with_tier = run(spec(), trace), run(spec(tier(name)), trace)
    assert without.results.cached.tolist() == [0, 0, 0, 0]
    assert without.report().tiers is None
    assert with_tier.results.cached.tolist() == [0, 0, 0, LOADED]
    tiers = with_tier.report().tiers
    assert tiers is not None and tiers.loaded_tokens == LOADED
    assert tiers.gigabytes_loaded == {name: pytest.approx(LOADED * MODEL.kv_bytes / 1e9)}
    assert tiers.gigabytes_stored[name] >= 3 * tiers.gigabytes_loaded[name]
    first_token = [cluster.results.first_at[3] for cluster in (without, with_tier)]
    assert first_token[1] < first_token[0]


@NAMES
def test_a_load_takes_as_long_as_its_bytes(name):
    trace = talks(0, 1, 2, 0)
    fast, slow = (run(spec(tier(name, bytes_per_s=rate)), trace) for rate in (50e9, 5e9))
    num_bytes = LOADED * MODEL.kv_bytes
    later_s = slow.results.first_at[3] - fast.results.first_at[3]
    assert later_s == pytest.approx(num_bytes * (1 / 5e9 - 1 / 50e9), rel=0.01)


def test_an_engine_learns_that_loading_takes_longer_than_computing():
    trace = talks(0, 1, 2, 0, 1, 2, 0, 1, 2)
    slow = run(spec(tier("host", bytes_per_s=2e9)), trace)
    assert slow.results.cached[3] > 0, "nothing is known of the tier yet"
    assert slow.results.cached[4:].tolist() == [0] * 5


@NAMES
def test_a_tier_keeps_no_more_than_fits(name):
    trace = talks(0, 1, 2, 3, 4, 0, 4)
    cached = run(spec(tier(name, 2 * CACHE)), trace).results.cached
    assert cached[5] == 0 and cached[6] > 0


def test_what_host_memory_has_evicted_comes_from_the_disk():
    both = run(spec(tier("host", CACHE), tier("disk")), talks(0, 1, 2, 3, 0)).report().tiers
    assert both is not None and both.loaded_tokens == LOADED
    assert both.gigabytes_loaded["disk"] > both.gigabytes_loaded["host"]


@pytest.mark.parametrize(("name", "loaded"), [("store", LOADED), ("disk", 0)])
def test_only_the_store_serves_other_replicas_some_seconds_after_it_was_written(name, loaded):
    trace = Trace("turns", np.array([0.0, 1.0, 20.0]), np.full(3, PROMPT), np.full(3, 4), [[0, 1, 2]] * 3)
    cached = run(spec(tier(name), replicas=3), trace).results.cached
    assert cached.tolist() == [0, 0, loaded], "three replicas in turn, and the second asks too early"


def test_replicas_learn_what_others_delete_from_the_store():
    order = [0, 0, 1, 2, 3, 0, 4, 4, 0, 5]
    ids = [*([10 * talk + piece for piece in range(3)] for talk in order), [900], [901]]
    prompts = np.array([PROMPT] * len(order) + [BLOCK // 2] * 2)  # the last two write nothing, and come later
    trace = Trace("turns", 20.0 * np.arange(len(ids)), prompts, np.full(len(ids), 4), ids)
    cluster = run(spec(tier("store", 2 * CACHE), replicas=2), trace)
    found = [
        replica.scheduler.parts[KVOffloading].tiers[0].index(0).names for replica in cluster.pools["decode"].replicas
    ]
    assert sorted(found[0]) == sorted(found[1]) and found[0]


def test_sizes_are_given_in_gib_for_one_replica():
    options = SimulationOptions(
        model="llama-3.1-8b",
        block_size=16,
        requests=10,
        kv_offloading_size=1.0,
        kv_offloading_disk_size=2.0,
        kv_offloading_store_size=4.0,
        disk_gbit=8.0,
    )
    made = make_cluster(options, find_trace(options))
    blocks = [2**30 * size // int(MODEL.kv_bytes * 16) for size in (1, 2, 4)]
    assert [(each.name, each.blocks) for each in made.tiers] == list(
        zip(("host", "disk", "store"), blocks, strict=True)
    )
    assert made.tiers[1].bytes_per_s == 1e9
    assert simulate(made, find_trace(options)).tiers is not None


@pytest.mark.parametrize("size", [0.0, -1.0, float("inf"), 1e-9])
@pytest.mark.parametrize("flag", ["--kv-offloading-size", "--kv-offloading-disk-size", "--kv-offloading-store-size"])
def test_a_size_without_room_for_a_block_is_refused(flag, size):
    options = SimulationOptions(requests=10, **{flag.removeprefix("--").replace("-", "_"): size})
    with pytest.raises(InvalidParameter, match=flag):
        make_cluster(options, find_trace(options))


@pytest.mark.parametrize("name", ["disk_gbit", "store_gbit"])
def test_a_bandwidth_that_moves_nothing_is_refused(name):
    options = SimulationOptions(requests=10, **{name: 0.0})
    with pytest.raises(InvalidParameter, match=f"--{name.replace('_', '-')}"):
        make_cluster(options, find_trace(options))


def test_a_model_whose_layers_keep_different_tokens_is_refused(tmp_path):
    options = SimulationOptions(model=str(make_model(tmp_path, "gemma3")), requests=10, kv_offloading_size=1.0)
    trace = Trace("short", np.array([1.0]), np.array([30]), np.array([5]))
    with pytest.raises(InvalidParameter, match="cannot offload"):
        make_cluster(options, trace)
