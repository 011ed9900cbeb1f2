"""The resources of one replica, as a placement group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from placement.console_log import LogConfig

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]

DIGITS = 4  # to which Ray counts resources


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One control actor and the ranks of one engine.

    num_cpus, num_gpus: of each rank.
    num_ranks: processes that share the model.
    accelerator_type: the GPU that a rank's node must have, as Ray names it (`L4`, `H100`); None takes any.
    label_selector: labels that a rank's node must have, in Ray's syntax: `v`, `!v`, `in(v, w)` or `!in(v, w)`.
    strategy: Ray's; PACK takes as few nodes as it can, STRICT_PACK one, STRICT_SPREAD one per rank.
    control_cpus: of the control actor, which only forwards requests and watches.
    startup_timeout_s: from starting the ranks until the model is loaded.
    stall_timeout_s: without a step that ends, while work is queued, until a rank counts as hung.
    log: of all these processes.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_ranks: int = 1
    accelerator_type: str | None = None
    label_selector: dict[str, str] = field(default_factory=dict)
    strategy: Strategy = "PACK"
    control_cpus: float = 0.1
    startup_timeout_s: float = 600.0
    stall_timeout_s: float = 10.0
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def rank_bundle(self) -> dict[str, float]:
        """What one rank needs."""
        bundle = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 0.001  # a mark of the node; nobody uses it up
        return {resource: amount for resource, amount in bundle.items() if amount > 0}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One per rank. The first also holds the control actor.

        So one rank is always on the control actor's node, and n ranks on n nodes need n nodes, not n + 1.
        """
        first = self.rank_bundle
        first["CPU"] = round(first.get("CPU", 0.0) + self.control_cpus, DIGITS)
        return [first, *(self.rank_bundle for _ in range(self.num_ranks - 1))]

    @property
    def label_selectors(self) -> list[dict[str, str]] | None:
        """One per bundle, or None if any node will do."""
        return [dict(self.label_selector) for _ in range(self.num_ranks)] if self.label_selector else None
