"""What a snapshot of a scheduler has of grammars."""

from __future__ import annotations

from engine.parts.grammar.grammars import Grammars
from engine.parts.snapshot_kinds import SnapshotKinds

KINDS = SnapshotKinds(
    objects=(Grammars,),
    changes={Grammars: lambda part: {"waiting": dict.fromkeys(part.waiting, ""), "watch": None}},
)
