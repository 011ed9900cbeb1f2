"""Options of pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class StageOptions(EngineOptions):
    pipeline_parallel_size: int = option(
        1,
        "Number of stages, each with some of the layers on `tensor_parallel_size` ranks. For models that are larger "
        "than one machine (docs/rank_groups.md).",
    )
    pipeline_layers: str | None = option(
        None, "Number of layers of each stage, such as `15,15,16,14`. Default: stages with about equal weights."
    )

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 1": "pipeline_parallel_size"})
