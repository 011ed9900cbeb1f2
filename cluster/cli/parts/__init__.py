"""Commands of features, a folder each."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import typer


def add_commands(app: typer.Typer, panel: str) -> None:
    """Add the commands of all features: each folder's `commands.py` has an `add_to`. panel: heading under which
    `manta --help` lists them."""
    for folder in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{folder.name}.commands").add_to(app, panel)
