"""Fits a cost model to measured steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from cluster.lab.simulator.cost_model import LinearCostModel, Work

MIN_STEPS = 30  # to which a cost can be fitted
CONTENTIONS = np.linspace(0.05, 2, 40).tolist()
MIN_CONTENTION = 0.1


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost. Errors are |predicted - measured| / measured over the steps."""

    cost: LinearCostModel
    steps: int
    error: float  #: median
    p90_error: float
    contention: float = 0.0  #: by what fraction a step takes longer for each other engine that computes as it begins

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def fit_cost(works: Sequence[Work], seconds: Sequence[float]) -> Fit:
    """Fit by least squares of the relative error, no coefficient negative, scaled to the measured sum of all steps.

    Relative, because a step of a long prompt takes a hundred times as long as one that decodes, and both matter.
    Scaled, because steps that were held up count for little in that, and yet requests waited for them.
    """
    if len(works) != len(seconds) or len(works) < len(Work._fields) + 1:
        raise ValueError(f"{len(works)} steps with {len(seconds)} times are too few to fit a cost")
    measured = np.asarray(seconds, dtype=np.float64)
    features = np.column_stack([np.ones(len(works)), np.asarray(works, dtype=np.float64)])
    coefficients = non_negative(features / measured[:, None])
    coefficients *= measured.sum() / (features @ coefficients).sum()
    errors = np.abs(features @ coefficients - measured) / measured
    cost = LinearCostModel(*coefficients.tolist())
    return Fit(cost, len(works), float(np.median(errors)), float(np.percentile(errors, 90)))


def fit_shared(works: Sequence[Work], seconds: Sequence[float], others: np.ndarray) -> Fit:
    """Fit a cost, and the contention of engines that share cores. others: for each step, the number of other engines
    that computed as it began. Contention is 0 if it cannot be told from the cost, or is small."""
    alone = fit_cost(works, seconds)
    if min(np.count_nonzero(others), np.count_nonzero(others == 0)) < MIN_STEPS:
        return alone
    measured, best, least = np.asarray(seconds, dtype=np.float64), alone, alone.error
    for contention in CONTENTIONS:
        slowed = 1 + contention * others
        found = fit_cost(works, (measured / slowed).tolist())
        if found.error < least:
            best, least = replace(found, contention=contention), found.error
    return best if best.contention >= MIN_CONTENTION else alone


def non_negative(features: np.ndarray) -> np.ndarray:
    """Return the coefficients of least squares to 1.

    Whatever comes out most negative is left out, until nothing is: for five features that is as good as a solver, and
    they need not be scaled.
    """
    scale = np.linalg.norm(features, axis=0)
    kept = [i for i in range(features.shape[1]) if scale[i] > 0]
    while True:
        found = np.linalg.lstsq(features[:, kept] / scale[kept], np.ones(len(features)), rcond=None)[0]
        if len(kept) == 1 or found.min() >= 0:
            break
        del kept[int(found.argmin())]
    coefficients = np.zeros(features.shape[1])
    coefficients[kept] = np.maximum(found, 0) / scale[kept]
    return coefficients
