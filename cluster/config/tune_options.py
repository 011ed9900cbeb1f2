"""Options of `manta tune`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.simulation_options import TRAFFIC, SimulationOptions
from engine.config_options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(SimulationOptions):
    """With a tape, traffic, cluster and engines are those of the tape."""

    trace: str = option("", "Traffic, as for `manta simulate`. Default: that of --tape.", **TRAFFIC, show_default=False)
    requests: int | None = option(
        None,
        "Number of requests of a simulation: those of the busiest time. Default: 2000, or all that there are.",
        **TRAFFIC,
        min=1,
    )
