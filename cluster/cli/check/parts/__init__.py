"""Checks of features, a folder each."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from cluster.cli.check.part_check import PartCheck


def part_checks() -> list[PartCheck]:
    """Return the checks of all features: the CHECK of each folder's `check.py`."""
    return [import_module(f"{__name__}.{folder.name}.check").CHECK for folder in pkgutil.iter_modules(__path__)]
