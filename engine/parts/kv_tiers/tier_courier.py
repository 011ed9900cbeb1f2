"""Carries commands to the tiers of all ranks, and their answers back."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.door.inputs import Input
from engine.core.mail.courier import Courier, TakeMessages
from engine.kv_offload.group_tiers import GroupTiers
from engine.parts.kv_tiers.inputs import TiersAnswered
from engine.parts.kv_tiers.kv_offloading import KVOffloading


class TierCourier(Courier):
    def __init__(self, offloading: KVOffloading, tiers: GroupTiers):
        self._offloading, self._tiers = offloading, tiers

    @property
    def is_awaited(self) -> bool:
        return self._offloading.moving

    def arrived(self, now: float) -> Sequence[Input]:
        return [TiersAnswered(answers)] if (answers := self._tiers.answers()) else ()

    def deliver(self, take: TakeMessages) -> None:
        if commands := take("tiers"):
            self._tiers.submit(commands)

    def flushed(self) -> bool:
        return self._offloading.flushed()
