"""Resources of one replica, as a placement group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from placement.console_log import LogConfig

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]

DIGITS = 4  # precision with which Ray counts resources


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Resources and limits of one control actor and the ranks of its engine."""

    num_cpus: float = 1.0  #: per rank
    num_gpus: float = 0.0  #: per rank
    num_ranks: int = 1  #: processes that share the model
    accelerator_type: str | None = None  #: GPU that a rank's node must have, as Ray names it (`L4`, `H100`); None: any
    #: labels that a rank's node must have, in Ray's syntax: `v`, `!v`, `in(v, w)` or `!in(v, w)`
    label_selector: dict[str, str] = field(default_factory=dict)
    strategy: Strategy = "PACK"  #: PACK takes as few nodes as it can, STRICT_PACK one, STRICT_SPREAD one per rank
    control_cpus: float = 0.1  #: CPUs of the control actor, which only forwards requests and watches
    startup_timeout_s: float = 600.0  #: time from starting the ranks until the model is loaded
    stall_timeout_s: float = 10.0  #: time without a finished step, while work is queued, after which an engine is hung
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def rank_bundle(self) -> dict[str, float]:
        """Resources of one rank."""
        bundle = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = (
                0.001  # only selects the node; Ray never runs out of it
            )
        return {resource: amount for resource, amount in bundle.items() if amount > 0}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One bundle per rank. The first also holds the control actor.

        So one rank is always on the control actor's node, and n ranks on separate nodes need n nodes, not n + 1.
        """
        first = self.rank_bundle
        first["CPU"] = round(first.get("CPU", 0.0) + self.control_cpus, DIGITS)
        return [first, *(self.rank_bundle for _ in range(self.num_ranks - 1))]

    @property
    def label_selectors(self) -> list[dict[str, str]] | None:
        """One selector per bundle, or None if any node will do."""
        return [dict(self.label_selector) for _ in range(self.num_ranks)] if self.label_selector else None
