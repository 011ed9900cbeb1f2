from __future__ import annotations

import itertools
import random

import pytest

from placement.rank_order import RankLocation, meeting_host, rank_order


def locations(*nodes: str) -> list[RankLocation]:
    """`a1` is device 1 of node a; `a` is node a without devices."""
    return [RankLocation(node[0], (node[1:],) if node[1:] else ()) for node in nodes]


@pytest.mark.parametrize(
    ("bundles", "home", "order"),
    [
        (["a"], "a", [0]),
        (["a", "a", "a"], "a", [0, 1, 2]),  # nothing to choose
        (["a", "b", "a", "b"], "a", [0, 2, 1, 3]),  # what PACK may give
        (["a", "b", "a", "b"], "b", [1, 3, 0, 2]),  # the control actor's node first
        (["a", "b", "c"], "d", [0, 1, 2]),  # it holds no rank
        (["a1", "a0"], "a", [1, 0]),  # devices in any order
        (["a10", "a9", "a2"], "a", [2, 1, 0]),  # as numbers, not as texts
        (["b1", "a1", "b0", "a0"], "a", [3, 1, 2, 0]),
        (["aGPU-f", "aGPU-3", "a7"], "a", [2, 1, 0]),  # UUIDs after numbers
    ],
)
def test_ranks_follow_node_and_device(bundles, home, order):
    assert rank_order(locations(*bundles), home) == order


@pytest.mark.parametrize(
    ("bundles", "home", "order"),
    [
        (["a1", "b2", "c1", "d2"], "a", [0, 2, 1, 3]),  # so of two stages of two ranks, each is within a rack
        (["a1", "b2", "c1", "d2"], "d", [3, 1, 0, 2]),  # the control actor's node first, then its rack
        (["a1", "b2", "c1", "b2"], "z", [0, 2, 1, 3]),
        (["a1", "b", "c1", "d"], "a", [0, 2, 1, 3]),  # nodes without labels
    ],
)
def test_nodes_of_a_rack_are_neighbours(bundles, home, order):
    """`a1` is a rank on node a in rack 1."""
    found = [RankLocation(bundle[0], rack=(None, None, bundle[1:] or None)) for bundle in bundles]
    assert rank_order(found, home) == order


@pytest.mark.parametrize(
    ("hosts", "host"),
    [
        (["10.0.0.1", "10.0.0.1"], "127.0.0.1"),
        (["fd00::1", "fd00::1"], "::1"),
        (["10.0.0.2", "10.0.0.1"], "10.0.0.2"),
        (["10.0.0.1", "10.0.0.1", "10.0.0.2"], "10.0.0.1"),
    ],
)
def test_ranks_of_one_machine_meet_where_no_other_machine_can_come(hosts, host):
    assert meeting_host(hosts) == host


def test_ranks_of_one_node_are_neighbours_however_the_bundles_fell():
    dice = random.Random(0)
    for _ in range(100):
        bundles = [RankLocation(dice.choice("abcd"), (str(device),)) for device in dice.sample(range(16), 12)]
        order = rank_order(bundles, "c")
        assert sorted(order) == list(range(12))
        ranks = [bundles[bundle] for bundle in order]
        nodes = [location.node for location in ranks]
        changes = sum(a != b for a, b in itertools.pairwise(nodes))
        assert changes == len(set(nodes)) - 1
        assert "c" not in nodes or nodes[0] == "c"
        for a, b in itertools.pairwise(ranks):
            assert a.node != b.node or int(a.devices[0]) < int(b.devices[0])
