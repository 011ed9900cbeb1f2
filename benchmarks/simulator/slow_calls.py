"""A simulated cluster whose replicas share the cores of one machine, as those of a real one on a laptop do."""

from __future__ import annotations

from cluster.lab.simulator.cluster import Cluster
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace


class SlowCalls(Cluster):
    """Replicas take time from calls. They do not where each has cores enough."""

    def __init__(self, spec: ClusterSpec, trace: Trace, *, busy_s: float = 0.0):
        """busy_s: by how much a call takes longer for each replica that computes as it sets out."""
        super().__init__(spec, trace)
        self._busy_s = busy_s

    def call_s(self) -> float:
        return super().call_s() + self._busy_s * self.num_busy()
