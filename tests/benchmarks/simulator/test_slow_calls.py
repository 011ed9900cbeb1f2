from __future__ import annotations

import numpy as np

from benchmarks.simulator.slow_calls import SlowCalls
from cluster.lab.simulator.trace import Trace
from tests.cluster.lab.simulator.small_cluster import small_cluster


def test_a_call_takes_longer_beside_replicas_that_compute():
    spec = small_cluster(replicas=1)
    trace = Trace("pair", np.array([1.0, 1.02]), np.array([100, 100]), np.array([100, 1]))
    firsts = []
    for busy_s in (0.0, 0.5):
        cluster = SlowCalls(spec, trace, busy_s=busy_s)
        cluster.run()
        firsts.append(cluster.results.first_at - trace.arrivals_s)
    assert firsts[0][0] == firsts[1][0]
    assert firsts[1][1] > 0.5 > firsts[0][1]
