"""A cluster on the simulated clock: an ingress queue, routers, replicas, and handoffs between replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cluster.lab.simulator.billing.meter import EngineMeter
from cluster.lab.simulator.conversations.turn import DueTurns
from cluster.lab.simulator.cost_model import CostModel
from cluster.lab.simulator.events import MESSAGE, EventLoop
from cluster.lab.simulator.handoffs import HandoffTraffic
from cluster.lab.simulator.moves import MoveTraffic
from cluster.lab.simulator.pool import Pool
from cluster.lab.simulator.replica import MAX_FAST_FORWARD_STEPS, Replica
from cluster.lab.simulator.results import LatencyHistogram, Report, Results
from cluster.lab.simulator.scaling import RoleScaling, Scaling
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.tiers import TierTraffic, make_tiers
from cluster.lab.simulator.trace import Trace
from deployments.billing.prices import FREE
from deployments.routing.config import Role
from engine.costs.step_cost import StepTimes
from engine.errors import PromptTooLong
from engine.fairness.fair_queue import FairQueue, QueuedRequest
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.remote_prefill_policy import RemotePrefillPolicy
from engine.serving.kv_events import UPDATE_PERIOD_S
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import FinishPrefill, OpenHandoff
from engine.wire.remote_request import Peer

POLL_INTERVAL_S = 1.0  # between polls of the engines, as in the real cluster
NO_LIMIT = 10**12
CLIENT = "everyone"

Progress = Callable[[int], None]


class Cluster:
    """One simulation run. Decisions are made by the real cluster's code; docs/simulator.md lists what is left out."""

    def __init__(self, spec: ClusterSpec, trace: Trace, *, fast_forward: int = MAX_FAST_FORWARD_STEPS):
        """fast_forward: maximum steps of a fast-forward; 0 simulates every step of every engine, slowly, as tests do
        for comparison, and as replicas that share cores need. Raises PromptTooLong."""
        if trace.longest >= spec.max_model_len:
            raise PromptTooLong(trace.longest, spec.max_model_len - 1)
        self.spec, self.trace, self.results, self.loop = spec, trace, Results(trace), EventLoop()
        self.turns = 0  # number of events processed
        self._fast_forward = 0 if spec.contention else fast_forward
        self._policies: list[RemotePrefillPolicy] = []
        self._engines = 0  # that ever existed
        self.pools = {role: Pool(role, spec, self._make_replica) for role in spec.sizes}
        self._decode, self._handoffs = self.pools["decode"], None
        self._tiers = TierTraffic(spec, self.loop, self._up, self._after) if spec.tiers else None
        if "prefill" in self.pools:
            self._handoffs = HandoffTraffic(spec, self.loop, self.pools["prefill"], self._after)
        self._queue = FairQueue(self._decode.capacity, spec.max_waiting, NO_LIMIT)
        self._scaling, self._moves = None, None
        if spec.limits is not None:
            scaling = RoleScaling if spec.switch_roles else Scaling
            self._scaling = scaling(spec, spec.limits, self.pools, self._queue, self.loop, self._drained)
        if spec.moves_requests:
            self._moves = MoveTraffic(spec, trace, self.loop, self._decode, self.results, self._after)
        self._traffic = [each for each in (self._handoffs, self._moves, self._tiers) if each is not None]
        self._waiting: dict[QueuedRequest, int] = {}
        self._running: dict[str, QueuedRequest] = {}
        self._turns = None if trace.turns is None else DueTurns(trace.turns)
        self._polled_at = 0.0
        self._done = 0

    def run(self, progress: Progress = lambda done: None) -> None:
        """Run until the last request of the trace has ended. progress: called from time to time with the number of
        ended requests."""
        loop, arrivals, come = self.loop, self.trace.arrivals_s.tolist(), 0
        first = range(len(arrivals)) if self._turns is None else self._turns.first
        while self._done + self.results.refused < len(arrivals):
            next_at = loop.next_at
            if come < len(first) and (next_at is None or arrivals[first[come]] < next_at):
                loop.now = arrivals[first[come]]
                self._arrive(first[come])
                come += 1
            else:
                assert next_at is not None, "requests wait, but no event is left that could start them"
                self.turns += 1
                if (replica := loop.step()) is not None:
                    self._after(replica)
            if loop.now >= self._polled_at + POLL_INTERVAL_S:
                self._poll()
                progress(self._done)
        progress(self._done)

    def report(self) -> Report:
        itl, duration_s = LatencyHistogram(), self.results.duration_s
        replicas = [replica for pool in self.pools.values() for replica in pool.replicas]
        for replica in replicas:
            itl += replica.itl
        uses = {str(role): pool.use(duration_s) for role, pool in self.pools.items()}
        meters = [replica.meter for replica in replicas if isinstance(replica.meter, EngineMeter)]
        handoffs = self._handoffs.use(duration_s) if self._handoffs else None
        tiers = None if self._tiers is None else self._tiers.use(replicas)
        moves = None if self._moves is None else self._moves.use()
        return self.results.report(self.spec, itl, uses, handoffs, tiers, moves, meters)

    def call_s(self) -> float:
        """Return the seconds that a call to a replica takes if it starts now."""
        return self.spec.call_s

    # -- a request -----------------------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        self.results.arrived_at[index] = self.loop.now
        queued = QueuedRequest(CLIENT, 1, int(self.trace.prompt_tokens[index]))
        if self._queue.offer(queued) is None:
            self.results.refused += 1
            self._ended(index)
            return
        self._waiting[queued] = index
        self._start()

    def _start(self) -> None:
        for queued in self._queue.start():
            request = self.trace.request(self._waiting.pop(queued))
            self._running[request.request_id] = queued
            replica = self._decode.choose(request.request_id, request.prompt)
            self.loop.at(self.loop.now + self.call_s(), self._add, replica, request)

    def _add(self, replica: Replica, request: GenerateRequest) -> None:
        replica.add(request, self.loop.now)
        self._after(replica)

    def _after(self, replica: Replica) -> None:
        """Process the effects of an event on a replica."""
        for traffic in self._traffic:
            traffic.act(replica)
        self.loop.watch(replica)
        pool = self.pools[replica.role]
        if pool.wants_updates:
            pool.publish(replica, self.loop.now)
            if replica.due is None:  # no further event will trigger its update, so schedule one
                self.loop.later(UPDATE_PERIOD_S, self._publish, replica)
        if not replica.ended:
            return
        for request in replica.ended:
            self._queue.leave(self._running.pop(request.request_id))
            self._decode.ended(request.request_id)
            self.results.ended(request, self.spec.token_s)
            self._done += 1
            self._ended(int(request.request_id))
        replica.ended.clear()
        self._start()

    def _ended(self, index: int) -> None:
        """Let the requests come that have waited for the end of this one, and for no other."""
        if self._turns is not None and self.trace.turns is not None:
            for other in self._turns.ended(index):
                came_s = self.loop.now + self.spec.token_s + self.trace.turns[other].think_s
                self.loop.at(came_s, self._arrive, other)

    # -- replicas ------------------------------------------------------------------------------------------

    def _make_replica(self, name: str, role: Role) -> Replica:
        spec = self.spec
        learns = spec.limits is not None or spec.prefill_replicas or spec.tiers or spec.prices != FREE
        times = StepTimes() if learns else None
        self._engines += 1
        policy = None
        if (role == "decode" or self.spec.switch_roles) and self.spec.prefill_replicas:
            assert times is not None
            policy = RemotePrefillPolicy(HandoffConfig(role="decode", policy=self.spec.handoff), times.by_tokens)
            self._policies.append(policy)
        handoffs = Handoffs(policy, Peer(name, name, self._engines))
        tiers = partial(make_tiers, self.spec) if self.spec.tiers else None
        replica = Replica(name, role, spec, handoffs, times, self._fast_forward, self.loop.now, tiers)
        if spec.contention:
            replica.cost = SharedCores(spec.cost, spec.contention, replica, self)
        return replica

    def num_busy(self, but: Replica | None = None) -> int:
        """Count the replicas that compute."""
        return sum(r.due is not None and r is not but for pool in self.pools.values() for r in pool.replicas)

    def _up(self) -> list[Replica]:
        return [replica for pool in self.pools.values() for replica in pool.up.values()]

    def _drained(self, replica: Replica) -> None:
        if self._moves is not None:
            self._moves.depart(replica)

    def _publish(self, replica: Replica) -> None:
        self.pools[replica.role].publish(replica, self.loop.now)

    def _poll(self) -> None:
        """Do what the real cluster does about once a second."""
        self._polled_at = now = self.loop.now
        for pool in self.pools.values():
            pool.poll(now)
        if "prefill" in self.pools and self.spec.handoff == "auto":
            states = [replica.prefill_state(now) for replica in self.pools["prefill"].up.values()]
            for policy in self._policies:
                policy.replicas = states
        if self._scaling is not None:
            self._scaling.poll()
            self._queue.window = self._decode.capacity
            self._start()


class SharedCores:
    """The cost of the steps of a replica whose cores compute for other replicas, and for messages, too."""

    def __init__(self, cost: CostModel, contention: float, replica: Replica, cluster: Cluster):
        self._cost, self._contention, self._replica, self._cluster = cost, contention, replica, cluster

    def seconds(self, tokens: int, sequences: int, pairs: float, context: float) -> float:
        on_way = sum(kind == MESSAGE for _, kind, *_ in self._cluster.loop.heap)
        # and those that set out as the step begins
        on_way += sum(isinstance(a, OpenHandoff | FinishPrefill) for a in self._replica.actions)
        others = self._cluster.num_busy(self._replica) + on_way
        return self._cost.seconds(tokens, sequences, pairs, context) * (1 + self._contention * others)


def simulate(spec: ClusterSpec, trace: Trace, progress: Progress = lambda done: None) -> Report:
    """Run a simulation, and return its report. Raises ServingError for traffic that the cluster could not serve
    at all."""
    started = time.perf_counter()
    cluster = Cluster(spec, trace)
    cluster.run(progress)
    return replace(cluster.report(), took_s=time.perf_counter() - started)
