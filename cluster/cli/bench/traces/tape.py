"""Reads the load of a tape."""

from __future__ import annotations

from pathlib import Path

from cluster.lab.recorded.recording import Recording
from cluster.lab.simulator.trace import Trace
from engine.parts.tape.file import is_tape


def read(path: Path) -> Trace | None:
    """Return the requests of a tape; None for another file. Raises InvalidParameter."""
    return Recording.of_files([path]).trace() if is_tape(path) else None
