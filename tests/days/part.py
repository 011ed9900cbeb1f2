"""What a day can have besides its cluster and the clients of chat requests. Each kind is a file of its own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tests.days.world import World


class Part:
    """A part on one day. It does nothing unless a subclass says so."""

    settle_s = 0.0  #: more than SETTLE_S of the world that it takes after the last request

    def clients(self) -> list[Coroutine[Any, Any, None]]:
        """Return what must end before the day can end."""
        return []

    @property
    def works_on(self) -> bool:
        """Whether work goes on that a client has stopped waiting for."""
        return False

    def check(self) -> None:
        """Check what must hold at any time. Called ten times a second."""

    def check_end(self) -> None:
        """Check that nothing is left."""

    def count(self) -> None:
        """Count what has happened, in `cluster.seen`."""


class Plan(Protocol):
    """What the seed says of a part. A frozen dataclass, as Day is."""

    def open(self, world: World) -> Part: ...
