"""Options of holds."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class HoldOptions(EngineOptions):
    max_held_share: float = option(
        0.5, "Fraction of the KV blocks that holds of clients may keep from being evicted (docs/holds.md); 0 for none."
    )
    max_held_share_per_client: float = option(0.25, "The same for the holds of one API key or client.")
    max_hold_s: float = option(86_400.0, "Longest time of a hold, in seconds; longer ones are refused.")

    def check(self) -> None:
        super().check()
        check_limits(self, {"above 0": "max_hold_s", "between 0 and 1": "max_held_share max_held_share_per_client"})
