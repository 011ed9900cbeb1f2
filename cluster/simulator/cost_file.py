"""A fitted step cost, kept in a file. Apart from calibration.py, since reading one needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from cluster.simulator.cost_model import Fit, LinearCostModel
from cluster.simulator.http_calibration import HttpFit
from engine.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Measured:
    """request_s: of the time to the first token, what is not steps; None where no cluster was asked."""

    cost: LinearCostModel
    request_s: float | None = None


def write_cost(found: Fit | HttpFit, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def read_cost(path: Path) -> Measured:
    """Raises InvalidParameter."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        limit = f"a file that `manta simulate fit` wrote ({error})"
        raise InvalidParameter("--cost", str(path), limit) from None
