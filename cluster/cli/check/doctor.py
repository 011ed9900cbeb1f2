"""All checks in turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from cluster.cli.check.finding import Finding
from cluster.cli.check.gpu import check_gpus
from cluster.cli.check.machine import check_machine, check_ports
from cluster.cli.check.model_fit import check_models
from cluster.cli.check.packages import check_packages
from cluster.cli.check.ray_cluster import check_nodes, find_nodes, this_machine
from cluster.cli.check.serve_config import check, read
from cluster.config import HOST, PORT
from engine.errors import StartupError
from placement.capacity import Node


def examine(config: Path | None, address: str | None) -> Iterator[Finding]:
    """config: a Serve configuration file. address: of a Ray cluster; None for the one of this machine, if there is one.

    Raises StartupError if there is no cluster at `address`.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    yield from check_packages()
    yield from check_machine()
    yield from check_gpus()
    nodes = find_nodes(address)
    yield from check_nodes(nodes)
    if nodes is None:  # or else the cluster has its ports already
        yield from check_ports(*_listens_at(config))
    if config is not None:
        here = nodes is None or (address is None and len(nodes) == 1)
        yield from _check_config(config, nodes or [this_machine()], here)


def _check_config(config: Path, nodes: Sequence[Node], here: bool) -> Iterator[Finding]:
    try:
        names = check(config)
        yield Finding("ok", "configuration", f"{config} is fine; models: {', '.join(names)}")
        for application in read(config):
            yield from check_models(application, nodes, here=here)
    except StartupError as error:
        yield Finding("problem", "configuration", str(error))


def _listens_at(config: Path | None) -> tuple[str, int]:
    """A file that cannot be read is a matter for others."""
    options: dict[str, Any] = {}
    if config is not None:
        with suppress(OSError, yaml.YAMLError, AttributeError):
            options = yaml.safe_load(config.read_text()).get("http_options") or {}
    return str(options.get("host", HOST)), int(options.get("port", PORT))
