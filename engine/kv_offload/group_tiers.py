"""The tiers of all ranks of an engine, combined for its rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.distributed.no_broadcaster import NoBroadcaster
from engine.kv_offload.tier_worker import TierWorker
from engine.wire.parts.kv_offload import StoreListing, TierAnswer, TierCommand

if TYPE_CHECKING:  # it needs pyzmq
    from engine.distributed.plan_broadcast import PlanBroadcaster


class GroupTiers:
    """Sends commands to the tiers of all ranks; each rank has a part of every block. A command ends once all ranks have
    answered. A block that failed on any rank counts as failed."""

    def __init__(
        self, worker: TierWorker, ranks: int, broadcaster: PlanBroadcaster | NoBroadcaster, wake: Callable[[], None]
    ):
        """worker: tiers of this rank. wake: function called from a thread when this rank has answered."""
        worker.wake = wake
        self._worker, self._ranks, self._broadcaster = worker, ranks, broadcaster
        self._answers: dict[tuple[int, bool], list[TierAnswer]] = {}  # by number and `copied`

    def submit(self, commands: list[TierCommand]) -> None:
        for command in commands:
            self._broadcaster.command(command)
            self._worker.submit(command)

    def answers(self) -> list[TierAnswer | StoreListing]:
        """Return what has arrived since the last call: one combined answer for each command that all ranks have
        answered, and listings of the store."""
        done: list[TierAnswer | StoreListing] = [*self._worker.listings()]
        for answer in [*self._worker.answers(), *self._broadcaster.take_answers(TierAnswer)]:
            key = answer.number, answer.copied
            found = self._answers.setdefault(key, [])
            found.append(answer)
            if len(found) == self._ranks:
                del self._answers[key]
                failed = sorted({index for one in found for index in one.failed})
                done.append(TierAnswer(*key, failed, any(one.is_unreachable for one in found)))
        return done
