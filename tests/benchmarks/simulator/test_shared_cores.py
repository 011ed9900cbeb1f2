from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulator.shared_cores import SharedCores
from cluster.simulator.trace import Trace
from tests.cluster.simulator.small_cluster import small_cluster


def test_replicas_that_share_cores_slow_each_other_down():
    spec = small_cluster(replicas=2, router="round_robin")
    pair = Trace("pair", np.array([1.0, 1.0]), np.array([100, 100]), np.array([40, 40]))
    one = Trace("one", np.array([1.0]), np.array([100]), np.array([40]))
    clusters = [
        SharedCores(spec, one, contention=0.5),
        SharedCores(spec, pair, contention=0.5),
        SharedCores(spec, pair),
    ]
    for cluster in clusters:
        cluster.run()
    alone, shared, apart = (cluster.report() for cluster in clusters)
    assert alone.itl_p50_ms == apart.itl_p50_ms
    assert shared.itl_p50_ms == pytest.approx(1.5 * apart.itl_p50_ms, rel=0.02)


def test_a_call_takes_longer_beside_replicas_that_compute():
    spec = small_cluster(replicas=1)
    trace = Trace("pair", np.array([1.0, 1.02]), np.array([100, 100]), np.array([100, 1]))
    firsts = []
    for busy_s in (0.0, 0.5):
        cluster = SharedCores(spec, trace, busy_s=busy_s)
        cluster.run()
        firsts.append(cluster.results.first_at - trace.arrivals_s)
    assert firsts[0][0] == firsts[1][0]
    assert firsts[1][1] > 0.5 > firsts[0][1]
