"""The Ray cluster, if one runs, or this machine as the cluster that `serve run` would start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import ray
import torch

from cluster.cli.check.finding import Finding
from engine.errors import StartupError
from placement.capacity import Node, can_grow, cluster_nodes

TOPIC = "Ray cluster"


def find_nodes(address: str | None) -> list[Node] | None:
    """Of the cluster at `address`; None, where that is None, if no cluster is found either.

    Raises StartupError if there is none at `address`.
    """
    try:
        ray.init(address=address or "auto", logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            return None
        shown = " ".join(str(error).split())
        raise StartupError(f"no Ray cluster answers at {address or os.environ['RAY_ADDRESS']}: {shown}") from None
    try:
        return cluster_nodes()
    finally:
        ray.shutdown()


def this_machine() -> Node:
    """As Ray would see it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    resources = {"CPU": float(cores), "GPU": float(torch.cuda.device_count())}
    return Node({name: amount for name, amount in resources.items() if amount}, {})


def check_nodes(nodes: list[Node] | None) -> Iterator[Finding]:
    if nodes is None:
        yield Finding("ok", TOPIC, "none runs here; `manta serve` starts one on this machine alone")
        return
    for node in nodes:
        shown = [f"{node.resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU")]
        shown.append(f"{node.resources.get('memory', 0.0) / 2**30:.0f} GiB of memory")
        shown += [f"{key}={value}" for key, value in node.labels.items() if not key.startswith("ray.io/")]
        yield Finding("ok", TOPIC, f"a node with {', '.join(shown)}")
    if can_grow(nodes):
        yield Finding("ok", TOPIC, "an autoscaler may add nodes")
