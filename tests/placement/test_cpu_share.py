"""The CPUs of a node, shared by the ranks without a GPU on it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from placement import cpu_share
from placement.cpu_share import ranks_on, threads_on

HERE, THERE = "a" * 56, "b" * 56


def placed(*bundles: tuple[str, dict[str, float]], state: str = "CREATED") -> dict[str, Any]:
    return {
        "state": state,
        "bundles": {number: resources for number, (_, resources) in enumerate(bundles)},
        "bundles_to_node_id": {number: node for number, (node, _) in enumerate(bundles)},
    }


CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
GROUPS = {
    "decode": placed((HERE, {"CPU": 1.1}), (HERE, CPU), (THERE, CPU)),
    "prefill": placed((HERE, {"CPU": 0.15})),
    "large": placed((HERE, GPU), (HERE, GPU)),
    "gone": placed((HERE, CPU), state="REMOVED"),
    "waiting": placed(("", CPU), state="PENDING"),
}


def test_ranks_with_a_gpu_and_replicas_that_are_gone_or_wait_for_a_node_do_not_count():
    assert (ranks_on(HERE, GROUPS), ranks_on(THERE, GROUPS), ranks_on("c" * 56, GROUPS)) == (3, 1, 0)


@pytest.mark.parametrize(
    ("configured", "threads", "warns"), [(None, 4, False), (1, 1, True), (4, 4, False), (9, 9, False)]
)
def test_a_configured_number_of_threads_is_kept_with_a_warning_where_cpus_stay_idle(
    configured, threads, warns, monkeypatch, caplog
):
    monkeypatch.setattr(cpu_share, "usable_cpus", lambda: 13.0)
    monkeypatch.setattr(cpu_share, "placement_group_table", lambda: GROUPS)
    caplog.set_level(logging.WARNING)
    assert threads_on(HERE, configured) == threads
    assert ("CPUs stay idle" in caplog.text) is warns
