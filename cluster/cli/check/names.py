"""Checks for files and distributions that clash with the names of our packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

from cluster.cli.check.finding import Finding
from cluster.distribution import DISTRIBUTION, ROOT

BELOW = __name__.removesuffix("cluster.cli.check.names")  # `manta.` where a wheel is installed
OUTERMOST = ("manta",) if BELOW else ("manta", "engine", "placement", "deployments", "cluster")


def check_folder(folder: Path) -> Iterator[Finding]:
    """Check for files that hide our packages from Ray's workers, whose import path begins with the folder in which
    their driver was started."""
    ours = ROOT.parent if BELOW else ROOT
    for name in OUTERMOST:
        found = PathFinder.find_spec(name, [str(folder)])
        if found is not None and found.origin is not None and not Path(found.origin).is_relative_to(ours / name):
            message = f"Ray's workers would import {found.origin} instead of Manta's `{name}`"
            yield Finding("problem", "names", message, "Rename it, or start in another folder")


def check_facade() -> Iterator[Finding]:
    """Check whether `manta/__init__.py` is ours. Another package `manta` may have overwritten the file, or may have
    removed it when that package was uninstalled. Fast if nothing is wrong."""
    if "manta" in sys.modules and "build" not in getattr(sys.modules["manta"], "__all__", ()):
        yield from check_distributions()
        yield Finding("problem", "names", "`manta/__init__.py` is not Manta's", f"Install {DISTRIBUTION} again")


def check_distributions() -> Iterator[Finding]:
    """Check whether another distribution has installed a package of the same name: pip silently overwrites files."""
    owners = packages_distributions()
    for name in OUTERMOST:
        if others := sorted(set(owners.get(name, ())) - {DISTRIBUTION}):
            message = (
                f"`{name}` is also a package of {', '.join(others)}, and the one installed last "
                "has overwritten the other"
            )
            yield Finding("problem", "names", message, f"Install {DISTRIBUTION} into a separate environment")
