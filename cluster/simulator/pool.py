"""Equal replicas, and the router of deployments/routing/ in front of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from cluster.simulator.replica import Replica
from cluster.simulator.results import PoolUse
from cluster.simulator.spec import PoolSpec
from deployments.routing.balancer import Balancer
from deployments.routing.config import Role, RoutingConfig
from deployments.routing.routing_context import PromptDigester


class Pool:
    """The replicas of one role."""

    def __init__(self, role: Role, spec: PoolSpec, make: Callable[[str], Replica], seed: int):
        """make: returns a new replica of the given name."""
        self.role, self.spec = role, spec
        self.replicas: list[Replica] = []  # all that there ever were
        self.up: dict[str, Replica] = {}  # those that get requests
        self._random = random.Random(seed)
        self._balancer: Balancer | None = None
        if spec.router != "random":  # which published gains are measured against, and no policy of the real router
            block_size = spec.config.known_block_size
            self._balancer = Balancer(RoutingConfig(policy=spec.router), role, block_size, self._random)
            # the other policies ignore prefixes, so they need not be read
            self._digester = PromptDigester(block_size if spec.router == "prefix_aware" else None)
        #: Whether the router wants the engines' updates.
        self.wants_updates = spec.router in ("prefix_aware", "power_of_two")
        self._names: list[str] = []
        self._make = make
        self._alive_s = 0.0
        self._since: dict[Replica, float] = {}  # when it came, of those that are still there
        self._draining: list[Replica] = []
        for _ in range(spec.replicas):
            self.grow(0.0)

    def choose(self, request_id: str, tokens: list[int]) -> Replica:
        if self._balancer is None:
            return self.up[self._names[self._random.randrange(len(self._names))]]
        prompt = self._digester.digest(request_id, tokens, "")
        return self.up[self._balancer.choose(prompt, self._names).engines[0]]

    def ended(self, request_id: str) -> None:
        """The request is over, or nothing is computed for it any more."""
        if self._balancer is not None:
            self._balancer.end(request_id, confirmed=True)

    def subscribe(self, now: float) -> None:
        if self.wants_updates:
            for replica in self.up.values():
                replica.subscribe(now)

    def publish(self, replica: Replica, now: float) -> None:
        """Pass the engine's updates on to the router, if it is time."""
        for update in replica.updates(now):
            if replica.name in self.up and self._balancer is not None:
                assert self._balancer.update(update), "no message is lost here"

    @property
    def capacity(self) -> int:
        """Sequences that the ingress lets in: as `window` in deployments/frontend/admission.py before any report."""
        max_num_seqs = self.spec.config.max_num_seqs
        return max(1, len(self.up) * (max_num_seqs + max(1, max_num_seqs // 8)))

    def grow(self, now: float) -> None:
        replica = self._make(f"{self.role}-{len(self.replicas)}")
        self.replicas.append(replica)
        self._since[replica] = now
        if self.wants_updates:
            replica.subscribe(now)
        self._set_up(self.up | {replica.name: replica})

    def drain(self) -> None:
        """Send no more requests to the replica with the fewest."""
        replica = min(self.up.values(), key=lambda r: len(r.scheduler.queue.running) + r.scheduler.queue.num_waiting)
        self._draining.append(replica)
        self._set_up({name: other for name, other in self.up.items() if other is not replica})

    def forget_ended(self, now: float) -> None:
        """Let drained replicas go that have nothing left to do."""
        for replica in [r for r in self._draining if r.due is None and not r.scheduler.has_work]:
            self._draining.remove(replica)
            self._alive_s += now - self._since.pop(replica)

    def use(self, duration_s: float) -> PoolUse:
        alive_s = self._alive_s + sum(duration_s - since for since in self._since.values())
        totals = [replica.scheduler.totals for replica in self.replicas]
        return PoolUse(
            replicas=self.spec.replicas,
            busy=sum(replica.busy_s for replica in self.replicas) / max(alive_s, 1e-9),
            steps=sum(total.steps for total in totals),
            preemptions=sum(total.preemptions for total in totals),
            gpu_hours=self.spec.gpus * alive_s / 3600,
        )

    def _set_up(self, up: dict[str, Replica]) -> None:
        self.up, self._names = up, list(up)
        if self._balancer is not None:
            self._balancer.keep(self._names)
