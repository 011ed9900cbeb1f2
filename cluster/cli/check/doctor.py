"""`manta doctor`: what this machine and its Ray cluster can run, and what is missing."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from cluster.cli.check.finding import Finding
from cluster.cli.check.layout_fit import check_layouts
from cluster.cli.check.model_fit import check_models, this_machine
from cluster.cli.check.names import check_distributions, check_folder
from cluster.cli.check.nodes import find_nodes
from cluster.cli.check.ports import check_ports
from cluster.config.app_config import AppConfig
from cluster.distribution import DISTRIBUTION
from cluster.entry_point import HOST, PORT
from cluster.serve_config import address_of, check_serve_config, load, ours
from deployments import ray_compat
from engine.errors import StartupError
from placement.capacity import Node, can_grow

EXTRAS = {"nixl": "KV between pools over RDMA", "otel": "traces"}
GPU_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def examine(config: Path | None, address: str | None, network_gbit: float | None = None) -> Iterator[Finding]:
    """Examine machine, cluster and configuration. address: address of a Ray cluster; None for one on this machine, if
    any. network_gbit: bandwidth of a node; None for that of its cards' data sheets.

    Raises StartupError if there is no cluster at `address`.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    yield from check_packages()
    yield from check_distributions()
    yield from check_folder(Path.cwd())
    yield from check_gpus()
    found = None
    try:
        found = find_nodes(address)
    except StartupError as error:
        if address or os.environ.get("RAY_ADDRESS"):
            raise
        advice = "The cluster may be starting or ending: try again; `ray stop` ends its remaining processes"
        yield Finding("warning", "Ray cluster", str(error), advice)
    nodes = found or [this_machine()]
    yield from check_nodes(nodes, "Ray cluster" if found else "this machine")
    host, port = HOST, PORT
    if config is not None:
        try:
            serve_config = load(config)
            host, port = address_of(serve_config)
            names = check_serve_config(serve_config)
            yield Finding("ok", "configuration", f"{config} is fine; models: {', '.join(names)}")
            here = found is None or (address is None and len(found) == 1)
            yield from check_fit(serve_config, nodes, here=here, network_gbit=network_gbit)
        except StartupError as error:
            yield Finding("problem", "configuration", str(error))
    if found is None:  # else the running cluster occupies the ports itself
        yield from check_ports(host, port)


def check_fit(
    serve_config: Mapping[str, Any], nodes: Sequence[Node], *, here: bool, network_gbit: float | None
) -> Iterator[Finding]:
    """Check whether the models of a configuration fit on the nodes, and say which layout suits them. here: whether the
    nodes are this machine. network_gbit: bandwidth of a node; None for that of its cards' data sheets."""
    for _, application in ours(serve_config):
        config = AppConfig.of(application)
        yield from check_models(config, nodes, here=here)
        yield from check_layouts(config, nodes, network_gbit)


def check_packages() -> Iterator[Finding]:
    wanted = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    yield check_needed([r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})])
    for extra, use in EXTRAS.items():
        yield check_extra(extra, use, [r for r in wanted if r.marker and r.marker.evaluate({"extra": extra})])
    if sys.platform == "linux":
        try:
            yield Finding("ok", "HAProxy", ray_compat.haproxy_binary())
        except FileNotFoundError as error:
            advice = "Or serve through Serve's slower proxy, with RAY_SERVE_ENABLE_HA_PROXY=0 in the environment"
            yield Finding("problem", "HAProxy", str(error), advice)


def check_needed(needed: Iterable[Requirement]) -> Finding:
    if wrong := [message for message in map(mismatch, needed) if message]:
        return Finding("problem", "packages", "; ".join(wrong), f"Install again: pip install {DISTRIBUTION}")
    found = f"Python {sys.version.split()[0]}, torch {version('torch')}, ray {version('ray')}, and all others needed"
    return Finding("ok", "packages", found)


def check_extra(extra: str, use: str, needed: Iterable[Requirement]) -> Finding:
    if wrong := [message for message in map(mismatch, needed) if message]:
        advice = f"Needed only for {use}: pip install '{DISTRIBUTION}[{extra}]'"
        return Finding("ok", f"extra {extra}", "; ".join(wrong), advice)
    return Finding("ok", f"extra {extra}", f"installed ({use})")


def mismatch(needed: Requirement) -> str | None:
    """Return what is wrong with an installed package, or None."""
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return f"{needed.name} is not installed"
    if not needed.specifier.contains(found, prereleases=True):
        return f"{needed.name} is {found}, {needed.specifier} is needed"
    return None


def check_gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield gpus_without_torch(gpus_of_driver())
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        message = f"{number}: {card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        yield Finding("ok", "GPU", message)
    if torch.cuda.is_available():
        yield check_compiler()


def check_compiler() -> Finding:
    """Check for a C compiler. Triton needs one when the first kernel runs; without it the engine would end at that
    point."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        advice = "Install gcc and the headers of the C library (Debian: gcc libc6-dev), or name another in CC"
        return Finding("problem", "C compiler", "not found, but Triton's kernels need one", advice)
    return Finding("ok", "C compiler", found)


def gpus_of_driver() -> list[str]:
    """Return lines like `NVIDIA L4, 550.54.15, 23034 MiB`; none without a driver."""
    if shutil.which(GPU_QUERY[0]) is None:
        return []
    done = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=20, check=False)
    return [] if done.returncode else done.stdout.strip().splitlines()


def gpus_without_torch(driver: list[str]) -> Finding:
    if not driver:
        return Finding("ok", "GPU", "none; models run on the CPU")
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs"
    advice = "Install a build for the driver's CUDA: https://pytorch.org/get-started/locally"
    return Finding("problem", "GPU", f"torch {torch.__version__} {build} and cannot use {'; '.join(driver)}", advice)


def check_nodes(nodes: Sequence[Node], topic: str) -> Iterator[Finding]:
    for node in nodes:
        shown = [f"{node.resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU")]
        shown += [f"{key}={value}" for key, value in node.labels.items() if not key.startswith("ray.io/")]
        yield Finding("ok", topic, f"a node with {', '.join(shown)}")
    if can_grow(nodes):
        yield Finding("ok", topic, "an autoscaler may add nodes")
