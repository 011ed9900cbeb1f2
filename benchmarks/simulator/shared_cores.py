"""A simulated cluster whose replicas share the cores of one machine, as those of a real one on a laptop do."""

from __future__ import annotations

from cluster.simulator.cluster import Cluster
from cluster.simulator.cost_model import CostModel
from cluster.simulator.events import MESSAGE
from cluster.simulator.replica import MAX_FAST_FORWARD_STEPS, Replica
from cluster.simulator.spec import ClusterSpec
from cluster.simulator.trace import Trace
from engine.wire.handoff import FinishPrefill, OpenHandoff


class SharedCores(Cluster):
    """Replicas take time from each other, and from calls. Neither happens where each has cores enough."""

    def __init__(self, spec: ClusterSpec, trace: Trace, *, contention: float = 0.0, busy_s: float = 0.0):
        """contention: by what fraction a step takes longer for each other replica that computes as it begins, and for
        each message on its way; above 0, nothing is fast-forwarded.
        busy_s: by how much a call takes longer for each replica that computes as it sets out."""
        super().__init__(spec, trace, fast_forward=0 if contention else MAX_FAST_FORWARD_STEPS)
        self._busy_s = busy_s
        if contention:
            for pool in self.pools.values():
                for replica in pool.replicas:
                    replica.cost = SlowedCost(spec.cost, contention, replica, self)

    def call_s(self) -> float:
        return super().call_s() + self._busy_s * self.num_busy()

    def num_busy(self, but: Replica | None = None) -> int:
        """Count the replicas that compute."""
        return sum(r.due is not None and r is not but for pool in self.pools.values() for r in pool.replicas)


class SlowedCost:
    """The cost of the steps of one replica of a cluster with shared cores."""

    def __init__(self, cost: CostModel, contention: float, replica: Replica, cluster: SharedCores):
        self._cost, self._contention, self._replica, self._cluster = cost, contention, replica, cluster

    def seconds(self, tokens: int, sequences: int, pairs: int, context: int) -> float:
        on_way = sum(kind == MESSAGE for _, kind, *_ in self._cluster.loop.heap)
        # and those that set out as the step begins
        on_way += sum(isinstance(a, OpenHandoff | FinishPrefill) for a in self._replica.scheduler.handoffs.actions)
        others = self._cluster.num_busy(self._replica) + on_way
        return self._cost.seconds(tokens, sequences, pairs, context) * (1 + self._contention * others)
