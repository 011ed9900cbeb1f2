"""The resources of one replica, as a placement group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One control actor and the ranks of one engine.

    num_cpus, num_gpus: of each rank.
    num_ranks: processes that share the model.
    control_cpus: of the control actor, which only forwards requests and watches.
    startup_timeout_s: from starting the ranks until the model is loaded.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_ranks: int = 1
    control_cpus: float = 0.1
    startup_timeout_s: float = 600.0

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Bundle 0 holds the control actor; bundle 1 + rank holds that rank."""
        rank = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        rank = {resource: amount for resource, amount in rank.items() if amount > 0}
        return [{"CPU": self.control_cpus}, *(dict(rank) for _ in range(self.num_ranks))]

    def bundle_of(self, rank: int) -> int:
        return 1 + rank
