"""What a snapshot of a scheduler has of holds."""

from __future__ import annotations

from typing import Any

from engine.parts.holds.hold_table import Hold, HoldTable, PromptOfHold
from engine.parts.holds.holds import Holds
from engine.parts.holds.no_holds import NoHolds
from engine.parts.holds.request_holds import RequestHolds
from engine.parts.snapshot_kinds import SnapshotKinds, Zeros
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HoldMark


def of_prompt(prompt: PromptOfHold) -> dict[str, Any]:
    return {"tokens": Zeros(len(prompt.tokens), packed=True), "cache_salt": ""}


KINDS = SnapshotKinds(
    objects=(Hold, HoldTable, Holds, NoHolds, PromptOfHold, RequestHolds),
    messages=(HoldMark, HoldOutcome),
    changes={Hold: lambda _: {"of": {}}, HoldTable: lambda _: {"_usages": []}, PromptOfHold: of_prompt},
)
