"""The CPUs with which a rank without a GPU computes: its part of those of its node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray.util import placement_group_table

from engine.devices.usable_cpus import threads_of_rank, usable_cpus

logger = logging.getLogger(__name__)


def threads_on(node: str, configured: int | None) -> int:
    """Return the number of threads of a rank on this machine. node: its Ray node id. configured: `num_threads`.

    It depends on the ranks that Ray has placed there by now: later ones do not change it.
    """
    cpus, num_ranks = usable_cpus(), max(1, ranks_on(node, placement_group_table()))
    threads = threads_of_rank(cpus, num_ranks)
    if configured is not None and configured < threads:
        logger.warning(
            "CPUs stay idle num_threads=%d cpus=%.1f ranks=%d; without num_threads each rank would compute with %d",
            configured, cpus, num_ranks, threads,
        )  # fmt: skip
    return configured or threads


def ranks_on(node: str, groups: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many bundles without a GPU are on a node. groups: Ray's table of placement groups."""
    return sum(
        group["bundles_to_node_id"].get(number) == node and not bundle.get("GPU")
        for group in groups.values()
        if group["state"] == "CREATED"
        for number, bundle in group["bundles"].items()
    )
