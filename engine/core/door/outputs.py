"""The one way out of a scheduler: events for clients, and messages for the other ends of its parts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine.core.output import Event

Receiver = Literal["engines", "encode engines", "control", "tiers", "adapters"]
"""Who gets a message: other engines' channels, the control actor, the tiers and the adapter loaders of all ranks."""


class Outputs:
    """What a scheduler has to say. Whoever drives it takes `events` and messages, and delivers them.

    Some messages let others write to blocks. A block that has just been reserved may have belonged to an ended sequence
    for which the steps in flight still write, so such a message goes only once the steps planned by then have ended.
    Messages to the same receiver keep their order.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        #: Number of the newest planned step.
        self.planned = 0
        self._posted: dict[Receiver, deque[tuple[int, Any]]] = {}

    def post(self, to: Receiver, message: Any, *, after_steps: bool = False) -> None:
        """Queue a message. after_steps: whether the steps planned so far must end first."""
        self._posted.setdefault(to, deque()).append((self.planned if after_steps else 0, message))

    def adopt(self, other: Outputs) -> None:
        """Take over the messages that were posted elsewhere, before a part served this scheduler."""
        for to, waiting in other._posted.items():
            self._posted.setdefault(to, deque()).extend(waiting)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self.events = self.events, []
        return events

    def take_messages(self, to: Receiver, ended: int) -> list[Any]:
        """Return the messages to a receiver that may go, oldest first. ended: number of the newest step that has
        ended."""
        waiting, ready = self._posted.get(to), list[Any]()
        while waiting and waiting[0][0] <= ended:
            ready.append(waiting.popleft()[1])
        return ready

    @property
    def num_posted(self) -> int:
        """Number of messages that have not been taken."""
        return sum(map(len, self._posted.values()))

    def clear(self) -> None:
        """Drop everything, since nobody is there to get it."""
        self.events = []
        self._posted.clear()
