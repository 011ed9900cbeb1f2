"""What one request keeps of its recurrent states."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.request import Request

STATES = "states"  # in Request.of
NEVER = 1 << 62  # a position


class StateSnapshot(NamedTuple):
    """A saved copy of a sequence's recurrent state before the token at `position`."""

    position: int
    snapshot: int


@dataclass(slots=True)
class RequestStates:
    """Snapshots of recurrent states that one request restores, saves and hands over."""

    source: StateSnapshot | None = None
    """Snapshot from which the request will start; None once it has started."""
    saves: deque[StateSnapshot] = field(default_factory=deque)
    """Snapshots that planned steps write or another engine hands over, oldest first."""
    wanted: list[int] = field(default_factory=list)
    """Future positions in its known tokens at which its state is saved, ascending."""
    last_wanted: int = 0
    """The last of the wanted positions that the sequence has passed."""
    next_save: int = NEVER
    """The next position at which a snapshot is saved."""
    newest: bytes = b""
    """Hash of the snapshot that the next one replaces."""

    @property
    def held(self) -> list[int]:
        """Snapshots that the request holds for itself, one entry for each reference."""
        sources = [] if self.source is None else [self.source.snapshot]
        return [*sources, *(save.snapshot for save in self.saves)]


def states_of(request: Request) -> RequestStates:
    """Return what a request keeps of its states."""
    states: RequestStates | None = request.of.get(STATES)
    if states is None:
        states = request.of[STATES] = RequestStates()
    return states


def held_by(request: Request) -> list[int]:
    """Return the snapshots that a request holds, one entry for each reference."""
    return [*states_of(request).held, *(snapshot for group in request.handed_over for snapshot in group)]
