"""Turns of a trace, and which of them may come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation, and what it waits for."""

    session: int  #: number of its conversation
    agent: int  #: within it: 0 for the agent that began it, another number for each subagent
    after: tuple[int, ...]  #: requests of the trace that have to end before it comes; empty if it comes at its time
    think_s: float  #: seconds from the end of the last of them until it comes


class DueTurns:
    """Says which requests of a trace come next, as others end."""

    def __init__(self, turns: Sequence[Turn]):
        self.first = [index for index, turn in enumerate(turns) if not turn.after]  #: those that come at their times
        self._missing = Counter({index: len(turn.after) for index, turn in enumerate(turns)})
        self._next: defaultdict[int, list[int]] = defaultdict(list)
        for index, turn in enumerate(turns):
            for before in turn.after:
                self._next[before].append(index)

    def ended(self, index: int) -> list[int]:
        """Record that a request has ended. Returns the requests that wait for no other any more."""
        due = []
        for other in self._next.pop(index, ()):
            self._missing[other] -= 1
            if not self._missing[other]:
                due.append(other)
        return due


def with_active(turns: Sequence[Turn], times_s: Sequence[float], conversations: int) -> list[Turn]:
    """Return the same turns with so many conversations at a time: each of the others begins as another has ended.

    times_s: when each request would come; those of one conversation that wait for nothing keep their distances.
    """
    waited_for = {before for turn in turns for before in turn.after}
    ends: dict[int, list[int]] = {}  # by conversation, in the order of their beginnings: what nothing waits for
    begins_s: dict[int, float] = {}
    for index, turn in enumerate(turns):
        begins_s.setdefault(turn.session, times_s[index])
        ends.setdefault(turn.session, []).extend(() if index in waited_for else (index,))
    before = dict(zip([*ends][conversations:], ends.values(), strict=False))
    return [
        turn
        if turn.after or turn.session not in before
        else replace(turn, after=tuple(before[turn.session]), think_s=times_s[index] - begins_s[turn.session])
        for index, turn in enumerate(turns)
    ]
