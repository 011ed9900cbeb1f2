"""A cluster on the simulated clock: an ingress queue, routers, replicas, and handoffs between them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.simulator.events import EventLoop
from cluster.simulator.handoffs import HandoffTraffic
from cluster.simulator.pool import Pool
from cluster.simulator.replica import MAX_FAST_FORWARD_STEPS, Replica
from cluster.simulator.results import LatencyHistogram, Report, Results
from cluster.simulator.scaling import Scaling
from cluster.simulator.spec import ClusterSpec, GoodputSlo
from cluster.simulator.trace import Trace
from deployments.frontend.fair_queue import FairQueue, QueuedRequest
from deployments.routing.config import Role
from engine.config import HandoffConfig
from engine.core.handoffs import HandoffManager, HandoffOutput
from engine.core.kv_events import UPDATE_PERIOD_S
from engine.core.remote_prefill_policy import RemotePrefillPolicy
from engine.core.step_cost import StepTimes
from engine.errors import PromptTooLong
from engine.wire.messages import GenerateRequest
from engine.wire.remote_prefill import Peer

POLL_INTERVAL_S = 1.0  # between two polls of the engines, as in the real cluster
NO_LIMIT = 10**12
CLIENT = "everyone"

Progress = Callable[[int], None]


class Cluster:
    """One run. What decides here is what decides in the real cluster; docs/simulator.md says what is left out."""

    def __init__(self, spec: ClusterSpec, trace: Trace, *, fast_forward: int = MAX_FAST_FORWARD_STEPS):
        """fast_forward: 0 takes every step of every engine by itself, which is slow, and is what tests compare to.
        Raises PromptTooLong."""
        if trace.longest >= spec.max_model_len:
            raise PromptTooLong(trace.longest, spec.max_model_len - 1)
        self.spec, self.trace, self.results = spec, trace, Results(trace)
        self.turns = 0  # of the event loop
        self._loop, self._fast_forward = EventLoop(), 0 if spec.contention else fast_forward
        self._policies: list[RemotePrefillPolicy] = []
        self._decode = Pool("decode", spec.decode, self._decode_replica, spec.seed)
        self.pools: dict[Role, Pool] = {"decode": self._decode}
        self.handoffs: HandoffTraffic | None = None
        if spec.prefill is not None:
            self.pools["prefill"] = prefill = Pool("prefill", spec.prefill, self._prefill_replica, spec.seed + 1)
            self.handoffs = HandoffTraffic(spec.network, spec.kv_bytes, self._loop, prefill, self._after)
        self._queue = FairQueue(
            self._decode.capacity, NO_LIMIT if spec.max_waiting is None else spec.max_waiting, NO_LIMIT
        )
        self.scaling = Scaling(spec.scaling, self.pools, self._queue, self._later) if spec.scaling else None
        self._waiting: dict[QueuedRequest, int] = {}
        self._running: dict[str, QueuedRequest] = {}
        self._polled_at = 0.0
        self._on_way = 0  # requests, to their replicas
        self._done = 0

    def run(self, progress: Progress = lambda done: None) -> None:
        """Run until the last request of the trace has ended. progress: is given now and then how many have."""
        loop, arrivals, come = self._loop, self.trace.arrivals_s.tolist(), 0
        while self._done + self.results.refused < len(arrivals):
            next_at = loop.next_at
            if come < len(arrivals) and (next_at is None or arrivals[come] < next_at):
                loop.now = arrivals[come]
                self._arrive(come)
                come += 1
            else:
                assert next_at is not None, "requests wait, and nothing is going on"
                self.turns += 1
                if (replica := loop.step()) is not None:
                    self._after(replica)
            if loop.now >= self._polled_at + POLL_INTERVAL_S:
                self._poll()
                progress(self._done)
        progress(self._done)

    def report(self, slo: GoodputSlo, took_s: float) -> Report:
        itl, duration_s = LatencyHistogram(), self.results.duration_s
        for pool in self.pools.values():
            for replica in pool.replicas:
                itl += replica.itl
        uses = {str(role): pool.use(duration_s) for role, pool in self.pools.items()}
        if self.scaling is not None:
            uses = {str(role): replace(uses[role], scaled=self.scaling.counts(role, duration_s)) for role in self.pools}
        handoffs = self.handoffs.use(duration_s) if self.handoffs else None
        return self.results.report(slo, itl, uses, handoffs, self.spec.gpus, took_s)

    # -- a request -----------------------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        queued = QueuedRequest(CLIENT, 1, int(self.trace.prompt_tokens[index]))
        if self._queue.offer(queued) is None:
            self.results.refused += 1
            return
        self._waiting[queued] = index
        self._start()

    def _start(self) -> None:
        for queued in self._queue.start():
            request = self.trace.request(self._waiting.pop(queued))
            self._running[request.request_id] = queued
            replica = self._decode.choose(request.request_id, request.prompt)
            call_s = self.spec.network.call_s + self.spec.network.busy_s * self._busy()
            self._on_way += 1
            self._loop.at(self._loop.now + call_s, self._add, replica, request)

    def _add(self, replica: Replica, request: GenerateRequest) -> None:
        self._on_way -= 1
        replica.add(request, self._loop.now)
        self._after(replica)

    def _after(self, replica: Replica) -> None:
        """Take note that something has happened to the replica."""
        self._loop.watch(replica)
        pool = self.pools[replica.role]
        if pool.wants_updates:
            pool.publish(replica, self._loop.now)
            if replica.due is None:  # nothing else will happen to it, so what it has to say now it says a little later
                self._later(UPDATE_PERIOD_S, lambda: pool.publish(replica, self._loop.now))
        if not replica.ended:
            return
        for request in replica.ended:
            self._queue.leave(self._running.pop(request.request_id))
            self._decode.ended(request.request_id)
            self.results.ended(request, self.spec.network.token_s)
            self._done += 1
        replica.ended.clear()
        self._start()

    # -- replicas ------------------------------------------------------------------------------------------

    def _decode_replica(self, name: str) -> Replica:
        if self.spec.prefill is None:
            return self._replica(name, "decode", None, StepTimes() if self.spec.scaling else None)
        times = StepTimes()
        policy = RemotePrefillPolicy(HandoffConfig(role="decode", policy=self.spec.handoff), times.by_tokens)
        self._policies.append(policy)
        return self._replica(name, "decode", HandoffManager(policy, Peer(name, name, len(self._policies))), times)

    def _prefill_replica(self, name: str) -> Replica:
        return self._replica(name, "prefill", HandoffManager(), StepTimes())

    def _replica(self, name: str, role: Role, handoffs: HandoffManager | None, times: StepTimes | None) -> Replica:
        spec = self.spec.decode if role == "decode" else self.spec.prefill
        assert spec is not None
        return Replica(
            name,
            role,
            spec,
            max_model_len=self.spec.max_model_len,
            handoffs=handoffs,
            times=times,
            fast_forward=self._fast_forward,
            forward=self._forward,
            slowdown=self._slowdown if self.spec.contention else None,
        )

    def _forward(self, replica: Replica, actions: list[HandoffOutput], now: float) -> None:
        assert self.handoffs is not None
        self.handoffs.act(replica, actions, now)

    def _slowdown(self, replica: Replica) -> float:
        on_way = self._on_way + (self.handoffs.on_way if self.handoffs else 0)
        return 1 + self.spec.contention * (self._busy(replica) + on_way)

    def _busy(self, but: Replica | None = None) -> int:
        """Count the replicas that compute."""
        return sum(r.due is not None and r is not but for pool in self.pools.values() for r in pool.replicas)

    def _poll(self) -> None:
        """Do what the real cluster does about once a second."""
        self._polled_at = now = self._loop.now
        for pool in self.pools.values():
            pool.subscribe(now)
            pool.forget_ended(now)
        if "prefill" in self.pools and self.spec.handoff == "auto":
            states = [replica.prefill_state(now) for replica in self.pools["prefill"].up.values()]
            for policy in self._policies:
                policy.replicas = states
        if self.scaling is not None:
            self.scaling.poll(now)
            self._queue.window = self._decode.capacity
            self._start()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._loop.at(self._loop.now + seconds, call)


def simulate(spec: ClusterSpec, trace: Trace, slo: GoodputSlo, progress: Progress = lambda done: None) -> Report:
    """Raises ServingError for what the cluster could not serve at all."""
    started = time.perf_counter()
    cluster = Cluster(spec, trace)
    gc.collect()
    gc.freeze()  # what there is now stays to the end, so that it need not be searched for garbage all the time
    try:
        cluster.run(progress)
    finally:
        gc.unfreeze()
    return cluster.report(slo, time.perf_counter() - started)
