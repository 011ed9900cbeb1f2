"""A fitted step cost, kept in a file. Apart from calibration.py, since reading one needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.simulator.http_calibration import HttpFit
from cluster.simulator.step_cost import Fit, LinearCost
from engine.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Measured:
    """request_s: of the time to the first token, what is not steps; None where no cluster was asked."""

    cost: LinearCost
    request_s: float | None = None


def write_cost(found: Fit | HttpFit, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read_cost(path: Path) -> Measured:
    """Raises InvalidParameter."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Measured(LinearCost(**content["cost"]), content.get("request_s"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidParameter("cost", str(path), f"a file of `manta simulate fit` ({error})") from None
