"""Identical replicas behind the router of deployments/routing/."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from cluster.lab.simulator.replica import Replica
from cluster.lab.simulator.results import PoolUse, ReplicaCounts
from cluster.lab.simulator.spec import ClusterSpec
from deployments.routing.balancer import Balancer
from deployments.routing.config import Role, RoutingConfig
from deployments.routing.prompt_digest import PromptDigester


class Pool:
    """The replicas of one role."""

    def __init__(self, role: Role, spec: ClusterSpec, make: Callable[[str, Role], Replica]):
        """make: function that returns a new replica with a given name."""
        self.role = role
        self.replicas: list[Replica] = []  # all replicas that ever existed
        self.up: dict[str, Replica] = {}  # replicas that get requests
        self.desired = [spec.sizes[role]]  # desired numbers of replicas so far, latest last
        self._spec, self._config, self._make = spec, spec.engine_of(role), make
        self._random = random.Random(spec.seed + (role == "prefill"))
        self._balancer: Balancer | None = None
        if spec.router != "random":  # "random" is a baseline of published results, not a policy of the real router
            block_size = self._config.known_block_size
            self._balancer = Balancer(RoutingConfig(policy=spec.router), role, block_size, self._random)
            # the other policies ignore prefixes, so they are not computed
            self._digester = PromptDigester(block_size if spec.router == "prefix_aware" else None)
        #: Whether the router uses the engines' updates.
        self.wants_updates = spec.router in ("prefix_aware", "power_of_two")
        self._names: list[str] = []
        self._num_made = 0
        self._since: dict[Replica, float] = {}  # start of each replica that still exists
        self._gone_s = 0.0  # total lifetime of the others, in seconds
        self.starting_s = 0.0  # that replicas took to start, up to now
        self._sizes: list[tuple[float, int]] = []  # (time, replicas that were up from then on)
        for _ in range(spec.sizes[role]):
            self.grow(0.0)
        del self._sizes[:-1]

    def choose(self, request_id: str, tokens: list[int]) -> Replica:
        if self._balancer is None:
            return self.up[self._names[self._random.randrange(len(self._names))]]
        prompt = self._digester.digest(request_id, tokens, "")
        return self.up[self._balancer.choose(prompt, self._names).engines[0]]

    def ended(self, request_id: str) -> None:
        """Record that the request has ended, or needs nothing more from this pool."""
        if self._balancer is not None:
            self._balancer.end(request_id, confirmed=True)

    def publish(self, replica: Replica, now: float) -> None:
        """Pass the engine's updates to the router, if they are due."""
        for update in replica.updates(now):
            if replica.name in self.up and self._balancer is not None:
                assert self._balancer.update(update), "the simulation loses no message"

    @property
    def capacity(self) -> int:
        """Number of sequences that the ingress admits, as in `window` of deployments/frontend/admission.py before any
        report."""
        max_num_seqs = self._config.max_num_seqs
        return max(1, len(self.up) * (max_num_seqs + max(1, max_num_seqs // 8)))

    def grow(self, now: float) -> None:
        replica = self._make(f"{self.role}-{self._num_made}", self.role)
        self._num_made += 1
        self.replicas.append(replica)
        self._since[replica] = now
        if self.wants_updates:
            replica.subscribe(now)
        self._set_up(self.up | {replica.name: replica}, now)

    def drain(self, now: float) -> Replica:
        """Send no more requests to the replica that has the fewest, and return it."""
        replica = min(self.up.values(), key=lambda r: len(r.scheduler.queue.running) + len(r.scheduler.queue.waiting))
        self._set_up({name: other for name, other in self.up.items() if other is not replica}, now)
        return replica

    def adopt(self, replica: Replica, other: Pool, now: float) -> None:
        """Take over a replica that leaves another pool for this one. It finishes the requests it still has."""
        other.replicas.remove(replica)
        self.replicas.append(replica)
        self._since[replica] = other._since.pop(replica)
        other._set_up({name: one for name, one in other.up.items() if one is not replica}, now)
        replica.role = self.role
        if self.wants_updates:
            replica.subscribe(now, resync=True)
        self._set_up(self.up | {replica.name: replica}, now)

    def poll(self, now: float) -> None:
        """Keep the router subscribed, and remove drained replicas that have no work left."""
        if self.wants_updates:
            for replica in self.up.values():
                replica.subscribe(now)
        for replica in [r for r in self._since if r.name not in self.up]:
            if replica.due is None and not replica.scheduler.has_work:
                replica.meter.stop(now)
                self._gone_s += now - self._since.pop(replica)

    def use(self, duration_s: float) -> PoolUse:
        """Return the pool's work. duration_s: duration of the simulation, above 0."""
        alive_s = self._gone_s + sum(duration_s - since for since in self._since.values())
        for replica in self._since:
            replica.meter.stop(duration_s)
        totals = [replica.scheduler.totals for replica in self.replicas]
        return PoolUse(
            replicas=self.desired[0],
            busy=sum(replica.busy_s for replica in self.replicas) / max(alive_s, 1e-9),
            steps=sum(total.steps for total in totals),
            preemptions=sum(total.preemptions for total in totals),
            engine_hours=alive_s / 3600,
            starting_hours=self.starting_s / 3600,
            gpu_hours=self._spec.replica_gpus * alive_s / 3600,
            scaled=self._counts(duration_s) if self._spec.limits else None,
        )

    def _counts(self, duration_s: float) -> ReplicaCounts:
        counts = [replicas for _, replicas in self._sizes]
        times = [min(when, duration_s) for when, _ in self._sizes] + [duration_s]
        mean = sum(n * (end - begin) for n, (begin, end) in zip(counts, pairwise(times), strict=True)) / duration_s
        return ReplicaCounts(min=min(counts), max=max(counts), mean=mean, wanted=max(self.desired), sizes=self._sizes)

    def _set_up(self, up: dict[str, Replica], now: float) -> None:
        self.up, self._names = up, list(up)
        self._sizes.append((now, len(up)))
        if self._balancer is not None:
            self._balancer.keep(self._names, now)
