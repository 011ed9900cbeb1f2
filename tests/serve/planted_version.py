"""The next version of Manta, as far as a cluster of two versions is concerned: this tree, with a few changes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.faults.fault import Fault

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "deployments", "engine", "manta", "placement")


APPENDED = (
    Fault(
        "a call has a further field",
        "deployments/replicas/encoded_request.py",
        "    of_other_engine: bool = False",
        "    urgency: int = 3\n    of_other_engine: bool = False",
        (),
    ),
    Fault(
        "a batch of tokens has a further field",
        "engine/wire/token_delta.py",
        '    numerics: str = ""\n',
        '    numerics: str = ""\n    weather: str = "fair"\n',
        (),
    ),
    Fault(
        "routers have a further option",
        "deployments/routing/config.py",
        "    running_weight: float | None = option(",
        '    weather_weight: float = option(1.0, "Cost of bad weather.")\n    running_weight: float | None = option(',
        (),
    ),
)
"""Fields that messages and options have in addition."""
OTHER_KERNEL = Fault(
    "norms are computed otherwise",
    "engine/model/ops/cpu/norm.py",
    "    scale = np.float32(1.0) / np.sqrt(sum_of_squares(x, source, size) / np.float32(size) + eps)",
    "    scale = np.float32(1.003) / np.sqrt(sum_of_squares(x, source, size) / np.float32(size) + eps)",
    (),
)
"""Changes all KV, and most texts."""
OTHER_DEFAULT = Fault(
    "an option has another default", "deployments/routing/config.py", "        2.0,\n", "        3.0,\n", ()
)


def plant(folder: Path, edits: Sequence[Fault] = ()) -> Path:
    """Copy the packages into a folder, which PYTHONPATH can name, and change them. Returns the folder."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        edit.plant(folder)
    return folder
