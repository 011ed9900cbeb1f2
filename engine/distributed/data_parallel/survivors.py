"""Engines that share experts and go on when one of them is lost.

Each loss begins a generation of engines; generation 0 is the start. Whoever has started the engines' processes knows
which of them have ended. So it alone decides who belongs to the next generation, and tells the members (`Roster`). Two
engines can never disagree, and an engine that is only slow is never left behind by the others. An engine with several
ranks is lost with any of them, so the members are all ranks of the engines that go on.

A rank notices the loss when a collective fails, or when another rank or the roster tells it. It then ends its own part
in the collectives, so that the ranks that wait for it notice too. The members meet at a store of their own, since the
one of the start may be gone: the first member listens, and tells the others where.
"""

from __future__ import annotations

import logging
import threading
import time

from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.data_parallel.roster import Lost, Meet, Message, Regroup
from engine.distributed.tp_group import ConnectedGroup, TPGroup
from engine.errors import EngineUnavailable, RendezvousTimeout, StartupError

logger = logging.getLogger(__name__)

ORDER_S = 60.0  # for the roster to say who goes on: a node's death is found late
MEET_S = 30.0  # for the members to meet
REACH_S = 2.0  # between two looks for a newer order while the first member cannot be reached


class Survivors:
    """One rank's view of the engines that go on. `hear` may be called by any thread, `regroup` by one."""

    def __init__(self, group: DataParallelGroup):
        self.generation = 0
        self.lost: str | None = None  #: why the present generation has ended; None if it has not
        self._group, self._waves, self._number = group, group.waves, group.all_engines.rank
        self._ranks: ConnectedGroup = group.all_engines  # present members, or those that are about to join
        self._options = self._ranks.options
        self._changed = threading.Condition()
        self._order: Regroup | None = None  # the newest
        self._addresses: dict[int, str] = {}  # where to meet, by generation
        self._closed = False

    @property
    def num_engines(self) -> int:
        return len(self._waves.members) // self._group.size

    def hear(self, message: Message) -> None:
        """Take note of what another engine or the roster says. If an engine is lost, collectives end at once."""
        with self._changed:
            match message:
                case Lost(generation, reason) if generation == self.generation:
                    self._end(reason)
                case Regroup(generation, _, reason) if generation > self._newest:
                    self._order = message
                    self._end(reason)
                case Meet(generation, address):
                    self._addresses[generation] = address
            self._changed.notify_all()

    def regroup(self, reason: str) -> ConnectedGroup:
        """Leave the present generation, and return the ranks of the next one, once all have joined.

        Raises EngineUnavailable if this engine does not go on, and StartupError if the members do not meet, perhaps
        because another engine was lost; then call it again.
        """
        with self._changed:
            self._end(reason)
        self._waves.tell(Lost(self.generation, reason))
        order = self._await_order(reason)
        if self._number not in order.members:
            raise EngineUnavailable(f"the other engines go on without this one: {order.reason}")
        self._waves.members = order.members
        rank, size = order.members.index(self._number), len(order.members)
        logger.warning("generation=%d engines=%d: %s", order.generation, self.num_engines, order.reason)
        if rank == 0:
            ranks = TPGroup.listen(size, self._group.host, **self._options)
            self._waves.tell(Meet(order.generation, ranks.address))
        else:
            ranks = self._reach(rank, size, order)
        with self._changed:
            self._ranks, self.lost = ranks, None
            if self._closed or self._order is not order:
                self._end("another engine was lost")
        try:
            ranks.join(MEET_S)
            self._group.use(ranks)
        except EngineUnavailable as error:  # in a first collective
            raise StartupError(str(error)) from error
        return ranks

    def close(self) -> None:
        """End the waits of `regroup`. May be called from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _newest(self) -> int:
        return self.generation if self._order is None else self._order.generation

    def _end(self, reason: str) -> None:
        """End the present generation."""
        self.lost = self.lost or reason
        self._ranks.leave(self.lost)

    def _await_order(self, reason: str) -> Regroup:
        """Wait for the newest order, and begin its generation."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._closed or self._newest > self.generation, ORDER_S)
            if self._closed or self._order is None or not came:
                raise EngineUnavailable(f"{reason}; nobody has said within {ORDER_S:.0f} s which engines go on")
            self.generation = self._order.generation
            return self._order

    def _reach(self, rank: int, size: int, order: Regroup) -> ConnectedGroup:
        """Connect to the first member, which may have died since it told where it listens."""
        address, deadline = self._await_address(order), time.monotonic() + MEET_S
        while True:
            try:
                return TPGroup.reach(rank, size, address, REACH_S, **self._options)
            except RendezvousTimeout:
                if self._closed or self._order is not order or time.monotonic() > deadline:
                    raise

    def _await_address(self, order: Regroup) -> str:
        with self._changed:
            told = self._addresses
            self._changed.wait_for(lambda: self._closed or self._order is not order or order.generation in told, MEET_S)
            if order.generation not in told:
                raise StartupError(f"the first engine has not said within {MEET_S:.0f} s where to meet")
            return told[order.generation]
