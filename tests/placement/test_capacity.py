from __future__ import annotations

import pytest

from placement.capacity import NODE_GROUP, Node, can_grow, matches, missing
from placement.spec import GroupSpec, Strategy


def node(cpu: float, gpu: float = 0, **labels: str) -> Node:
    resources = {"CPU": cpu, "GPU": gpu, "memory": 1e10, "node:10.0.0.1": 1.0}
    return Node({name: amount for name, amount in resources.items() if amount}, labels)


@pytest.mark.parametrize(
    ("strategy", "nodes", "fits"),
    [
        ("PACK", [node(2.1)], True),
        ("PACK", [node(2)], False),  # the control actor's 0.1 CPU
        ("PACK", [node(1.1), node(1)], True),
        ("PACK", [node(1), node(1)], False),
        ("SPREAD", [node(1), node(1.1)], True),
        ("SPREAD", [node(2.1)], True),  # as far as it can be had
        ("STRICT_PACK", [node(1.1), node(1)], False),
        ("STRICT_PACK", [node(1), node(2.1)], True),
        ("STRICT_SPREAD", [node(8)], False),
        ("STRICT_SPREAD", [node(8), node(1)], True),
        ("STRICT_SPREAD", [node(8), node(0.9)], False),
    ],
)
def test_two_ranks_fit_or_not(strategy: Strategy, nodes, fits):
    spec = GroupSpec(num_ranks=2, strategy=strategy)
    assert (missing(spec, nodes) is None) == fits


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (GroupSpec(num_gpus=1, accelerator_type="H100"), "no node has type H100"),
        (GroupSpec(num_cpus=64), "no node has 64.1 CPU, at most 16"),
        (GroupSpec(num_cpus=12, num_gpus=1), "no node has all of it together"),
        (GroupSpec(num_ranks=8, num_gpus=1), "only 2 of them fit anywhere"),
        (GroupSpec(num_ranks=2, num_cpus=9, strategy="STRICT_PACK"), "only 1 of them fits on one node"),
        (GroupSpec(num_ranks=4, strategy="STRICT_SPREAD"), "only 3 of them fit on separate nodes"),
        (GroupSpec(label_selector={"pool": "prefill"}), "no node has the labels {pool: prefill}"),
        (GroupSpec(num_gpus=1, label_selector={"pool": "big"}), "no node has 1 GPU"),
    ],
)
def test_message_says_what_is_missing_and_what_there_is(spec, problem):
    message = missing(spec, [node(8, 1, pool="decode"), node(8, 1, pool="decode"), node(16, pool="big")])
    assert message is not None and problem in message and "\n" not in message
    assert "The cluster has" in message
    assert "16 CPU" in message and "8 CPU + 1 GPU" in message


def test_message_in_full():
    message = missing(GroupSpec(num_ranks=4, num_gpus=1, strategy="STRICT_PACK"), [node(8, 2), node(8, 2)])
    assert message == (
        "a replica needs 4 ranks, each with 1 CPU + 1 GPU, and 0.1 CPU more for the first (STRICT_PACK), "
        "but only 2 of them fit on one node. The cluster has 2 nodes with 8 CPU + 2 GPU"
    )


def test_type_of_accelerator_is_asked_of_every_node():
    l4 = Node({"CPU": 8.0, "GPU": 2.0, "accelerator_type:L4": 1.0}, {})
    assert missing(GroupSpec(num_ranks=4, num_gpus=1, accelerator_type="L4"), [l4, l4]) is None
    assert missing(GroupSpec(num_ranks=4, num_gpus=1, accelerator_type="L4"), [l4, node(8, 2)]) is not None


@pytest.mark.parametrize(
    ("value", "matching"),
    [("a", {"a"}), ("!a", {"b", None}), ("in(a, b)", {"a", "b"}), ("!in(a,b)", {None})],
)
def test_label_selectors_match_as_ray_matches_them(value, matching):
    for label in ("a", "b", None):
        assert matches({"pool": label} if label else {}, {"pool": value}) == (label in matching)


def test_cluster_of_node_groups_can_grow():
    assert not can_grow([node(1), node(1, pool="decode")])
    assert can_grow([node(1), Node({}, {NODE_GROUP: "workers"})])
