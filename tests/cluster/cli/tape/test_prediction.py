from __future__ import annotations

from dataclasses import replace

import numpy as np

from cluster.cli.tape.prediction import cautions
from cluster.simulator.cluster import simulate
from cluster.simulator.trace import Trace
from tests.cluster.simulator.small_cluster import small_cluster

CALM = Trace("calm", np.array([0.0, 100.0]), np.array([20, 20]), np.array([5, 5]))


def test_another_number_of_engines_that_share_cores_is_warned_of():
    two = replace(small_cluster(replicas=2), contention=0.5)
    three, bigger = replace(two, replicas=3), replace(two, num_blocks=500)
    assert "share cores" in cautions(two, three, simulate(three, CALM))[0]
    assert not cautions(two, bigger, simulate(bigger, CALM))
    apart = small_cluster(replicas=2)
    assert not cautions(apart, replace(apart, replicas=3), simulate(apart, CALM))


def test_engines_that_compute_nearly_all_the_time_are_warned_of():
    busy = Trace("busy", np.zeros(8), np.full(8, 20), np.full(8, 50))
    spec = small_cluster(replicas=1)
    assert "so near their limit" in cautions(spec, spec, simulate(spec, busy))[0]
