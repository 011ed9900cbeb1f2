"""Carries what ranks find when they compare blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.core.door.inputs import Input
from engine.core.loop_observer import LoopObserver
from engine.core.mail.courier import Courier
from engine.core.output import Event
from engine.distributed.no_broadcaster import NoBroadcaster
from engine.parts.kv_check.inputs import KVCompared
from engine.parts.kv_check.kv_check import CHECKED, KVCheck
from engine.parts.kv_check.messages import EQUAL, BlockCompared

if TYPE_CHECKING:  # they need pyzmq, or torch
    from engine.distributed.plan_broadcast import PlanBroadcaster
    from engine.parts.kv_check.rank.block_comparer import BlockComparer


class KVCheckCourier(Courier):
    """A block is compared once all ranks have answered, and differs if it differs on any."""

    def __init__(
        self, check: KVCheck, comparer: BlockComparer, ranks: int, broadcaster: PlanBroadcaster | NoBroadcaster
    ):
        """comparer: of this rank."""
        self._check, self._comparer, self._ranks, self._broadcaster = check, comparer, ranks, broadcaster
        self._layers: dict[int, list[int]] = {}  # by the number of the pair

    @property
    def is_awaited(self) -> bool:
        return self._check.awaits

    def arrived(self, now: float) -> Iterator[Input]:
        if not self._check.awaits:
            return
        for answer in [*self._comparer.answers(), *self._broadcaster.take_answers(BlockCompared)]:
            layers = self._layers.setdefault(answer.number, [])
            layers.append(answer.layer)
            if len(layers) == self._ranks:
                del self._layers[answer.number]
                yield KVCompared(answer.number, min((each for each in layers if each != EQUAL), default=EQUAL))


class HiddenChecks(LoopObserver):
    """Nobody outside hears of the requests that check blocks."""

    def report(self, events: list[Event]) -> list[Event]:
        return [event for event in events if CHECKED not in event.request.of]
