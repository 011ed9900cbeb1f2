"""Options of the check of cached KV."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class KVCheckOptions(EngineOptions):
    kv_check_every: int | None = option(
        None,
        "At most one in so many computed tokens is computed to check KV that came from a tier or another engine; 0 for "
        "none. Default: 200 where a token has the same bits in any batch, 0 elsewhere (docs/sdc_check.md).",
    )

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 0": "kv_check_every"})
