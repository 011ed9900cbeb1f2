from __future__ import annotations

import numpy as np
import pytest

from cluster.lab.recorded.cost_fit import fit_shared
from cluster.lab.simulator.cost_model import LinearCostModel, Work

COST = LinearCostModel(0.001, 1e-5, 1e-4, 0.0, 1e-7)


def steps(contention: float) -> tuple[list[Work], list[float], np.ndarray]:
    rng = np.random.default_rng(0)
    works = [Work(int(n), int(n), 0.0, int(100 * n * rng.random())) for n in rng.integers(1, 20, 400)]
    others = rng.integers(0, 3, 400)
    noise = rng.normal(1, 0.02, 400)
    seconds = [COST.seconds(*w) * (1 + contention * o) * e for w, o, e in zip(works, others, noise, strict=True)]
    return works, seconds, others


@pytest.mark.parametrize("contention", [0.0, 0.5, 1.2])
def test_it_is_seen_that_engines_share_cores(contention):
    fit = fit_shared(*steps(contention))
    assert fit.contention == pytest.approx(contention, abs=0.06)
    assert fit.cost.seconds(10, 10, 0, 1000) == pytest.approx(COST.seconds(10, 10, 0, 1000), rel=0.1)


def test_engines_that_never_compute_alone_tell_nothing_of_each_other():
    works, seconds, _ = steps(0.0)
    assert fit_shared(works, seconds, np.ones(400)).contention == 0.0
