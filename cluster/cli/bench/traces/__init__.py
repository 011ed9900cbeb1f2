"""Recorded loads that are no files of the simulator, a file for each kind."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

from cluster.lab.simulator.trace import Trace


def read_trace(path: Path) -> Trace:
    """Return the trace of a file: that of the first kind whose `read` knows it, else as the simulator reads it. Raises
    InvalidParameter."""
    for kind in pkgutil.iter_modules(__path__):
        trace: Trace | None = import_module(f"{__name__}.{kind.name}").read(path)
        if trace is not None:
            return trace
    return Trace.read(path)
