"""What the builder says about the cluster that it finds."""

from __future__ import annotations

import logging

import pytest

from cluster.app import warn_of_idle_gpus
from cluster.config.app_config import AppConfig
from placement.capacity import Node

CPUS = Node({"CPU": 8.0}, {})
GPU = Node({"CPU": 8.0, "GPU": 1.0}, {})


def config(**pools):
    return AppConfig.parse({"models": [{"name": "pocket", "model": "pocket", **pools}]})


@pytest.mark.parametrize(
    ("pools", "nodes", "says"),
    [
        ({}, [CPUS, GPU], "the cluster has 1 GPU, but all models run on CPUs"),
        ({}, [GPU, GPU], "the cluster has 2 GPUs"),
        ({}, [CPUS], None),
        ({"decode": {"num_gpus": 1}}, [GPU], None),
        ({"prefill": {"num_gpus": 0.5}, "decode": {}}, [GPU], None),
    ],
)
def test_gpus_that_no_rank_asks_for_are_warned_of(caplog, pools, nodes, says):
    with caplog.at_level(logging.WARNING):
        warn_of_idle_gpus(config(**pools), nodes)
    assert (says in caplog.text) if says else not caplog.text
