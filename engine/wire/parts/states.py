"""Snapshots of recurrent states."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from engine.wire.part_record import PartRecord


class StateRestore(NamedTuple):
    """Before the step, the sequence in `slot` resumes from a snapshot of its recurrent state."""

    slot: int
    snapshot: int


class StateSave(NamedTuple):
    """During the step, the recurrent state of the sequence in `slot` before the token at `position` is saved to a
    snapshot."""

    slot: int
    position: int
    snapshot: int


class StateStep(PartRecord, frozen=True, array_like=True):
    """What a step does with snapshots."""

    part: ClassVar[str] = "states"

    restored: list[StateRestore]
    saved: list[StateSave]
    """At most one per sequence."""

    def decided(self) -> tuple[int, ...]:
        return tuple(number for row in (*self.restored, *self.saved) for number in row)


NO_STATES = StateStep([], [])
