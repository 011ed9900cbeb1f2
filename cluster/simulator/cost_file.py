"""A fitted step cost, kept in a file. Apart from calibration.py, since reading one needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cluster.simulator.step_cost import Fit, LinearCost
from engine.errors import InvalidParameter


def write_cost(found: Fit, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read_cost(path: Path) -> LinearCost:
    """Raises InvalidParameter."""
    try:
        return LinearCost(**json.loads(path.read_text(encoding="utf-8"))["cost"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidParameter("cost", str(path), f"a file of `manta simulate fit` ({error})") from None
