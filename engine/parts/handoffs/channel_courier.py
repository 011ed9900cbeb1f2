"""Carries what a scheduler sends through a channel to other engines, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from engine.core.door.inputs import Input
from engine.core.door.outputs import Receiver
from engine.core.mail.courier import Courier, Engine, TakeMessages
from engine.wire.handoff import HandoffEvent

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel


class ChannelCourier(Courier):
    def __init__(
        self,
        channel: HandoffChannel,
        receiver: Receiver,
        went_on: Callable[[HandoffEvent], Input],
        rest: Callable[[list[str]], Input],
    ):
        """receiver: whom the channel reaches. went_on, rest: make the inputs for an event, and for the engines to which
        links have failed."""
        self.channel = channel
        self._receiver, self._went_on, self._rest = receiver, went_on, rest
        self._resting: list[str] = []

    def arrived(self, now: float) -> Iterator[Input]:
        if (resting := [*self.channel.quarantined()]) != self._resting:
            self._resting = resting
            yield self._rest(resting)
        yield from map(self._went_on, self.channel.events())

    def deliver(self, take: TakeMessages) -> None:
        if actions := take(self._receiver):
            self.channel.submit(*actions)

    def status(self, core: Engine) -> dict[str, Any]:
        return {"live_handoffs": self.channel.snapshot(), "refused": self.channel.refused_by_ranks()}

    def close(self) -> None:
        self.channel.close()
