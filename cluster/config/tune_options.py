"""Options of `manta tune`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cluster.config.simulation_options import TRAFFIC, SimulationOptions
from engine.config_options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(SimulationOptions):
    """With a tape, traffic, cluster and engines are those of the tape."""

    trace: str = option("", "Traffic, as for `manta simulate`. Default: that of --tape.", **TRAFFIC, show_default=False)
    requests: int = option(2000, "Number of requests of a simulation: those of the busiest time.", **TRAFFIC, min=1)

    def given(self) -> dict[str, object]:
        """Return the options that are not at their default, by flag."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {f"--{name.replace('_', '-')}": value for name, (value, default) in values.items() if value != default}
