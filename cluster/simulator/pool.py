"""Equal replicas, and the router in front of them."""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulator.replica import Replica
from cluster.simulator.results import PoolUse
from cluster.simulator.routing import make_router
from cluster.simulator.spec import PoolSpec
from deployments.routing.config import Role


class Pool:
    """replicas: all that there ever were. up: those that get requests."""

    def __init__(self, role: Role, spec: PoolSpec, make: Callable[[str], Replica], seed: int):
        """make: a replica of this name."""
        self.role, self.spec = role, spec
        self.replicas: list[Replica] = []
        self.up: dict[str, Replica] = {}
        self._router = make_router(spec.router, role, spec.config.known_block_size, seed)
        self._names: list[str] = []
        self._make = make
        self._alive_s = 0.0
        self._since: dict[Replica, float] = {}  # when it came, of those that are still there
        self._draining: list[Replica] = []
        for _ in range(spec.replicas):
            self.grow(0.0)

    def choose(self, request_id: str, tokens: list[int]) -> Replica:
        return self.up[self._router.choose(request_id, tokens, self._names)]

    def ended(self, request_id: str) -> None:
        self._router.end(request_id)

    @property
    def follows(self) -> bool:
        """Whether the router wants news of the engines."""
        return self._router.follows

    def follow(self, now: float) -> None:
        if self.follows:
            for replica in self.up.values():
                replica.follow(now)

    def publish(self, replica: Replica, now: float) -> None:
        """The engine tells the router how it is, if it is time."""
        for news in replica.news(now):
            if replica.name in self.up:
                self._router.news(news)

    @property
    def capacity(self) -> int:
        """Sequences that the ingress lets in: as `window` in deployments/frontend/admission.py without any news."""
        max_num_seqs = self.spec.config.max_num_seqs
        return max(1, len(self.up) * (max_num_seqs + max(1, max_num_seqs // 8)))

    def grow(self, now: float) -> None:
        replica = self._make(f"{self.role}-{len(self.replicas)}")
        self.replicas.append(replica)
        self._since[replica] = now
        if self.follows:
            replica.follow(now)
        self._set_up(self.up | {replica.name: replica})

    def drain(self) -> None:
        """One replica gets no more requests: the one with the fewest."""
        replica = min(self.up.values(), key=lambda r: len(r.scheduler.queue.running) + r.scheduler.queue.num_waiting)
        self._draining.append(replica)
        self._set_up({name: other for name, other in self.up.items() if other is not replica})

    def forget_ended(self, now: float) -> None:
        """Drained replicas that have nothing to do any more are gone."""
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
        self._router.keep(self._names)
