"""Options of the tape."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class TapeOptions(EngineOptions):
    tape_mib: int = option(
        8,
        "MiB of memory for the newest part of the tape, from which `manta replay` shows every decision of the "
        "scheduler, and as much of `/dev/shm`; 0 for none (docs/replay.md).",
    )
    tape_dir: str | None = option(
        None,
        "Folder for the tapes of engines that failed, hung or were killed, or whose first tokens were late. Default: "
        "`manta-tapes-UID` in the folder for temporary files.",
    )
    max_kept_tapes: int = option(8, "Maximum number of files in `tape_dir` for each cause; the newest stay.")

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 1": "max_kept_tapes", "at least 0": "tape_mib"})
