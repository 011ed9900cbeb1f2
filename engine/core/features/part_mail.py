"""Carries messages between a scheduler's parts and their other ends: engines, tiers, adapters, the control actor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.core.door.inputs import PartInput
from engine.core.features.handoffs import HandoffOutput
from engine.core.features.part_inputs import (
    AdapterNumbered,
    AdapterRead,
    CommandsTaken,
    HandoffWentOn,
    ImageWentOn,
    LinksRest,
    Parts,
    TiersAnswered,
)
from engine.kv_offload.group_tiers import GroupTiers, NoTiers
from engine.kv_transfer.no_channel import NoChannel
from engine.lora.group_loader import GroupLoader
from engine.wire.kv_offload import TierCommand
from engine.wire.lora import LoRARequest
from engine.wire.messages import AdapterLoaded, CancelDispatch, DispatchRemote
from engine.wire.token_delta import ErrorInfo

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel

Notice = DispatchRemote | CancelDispatch | AdapterLoaded
"""A message for the control actor."""


class PartMail:
    """Takes what parts send out, and gives what comes for them. Used by the thread of the step loop."""

    def __init__(
        self,
        scheduler: Parts,
        *,
        channel: HandoffChannel | NoChannel,
        image_channel: HandoffChannel | NoChannel,
        tiers: GroupTiers | NoTiers,
        adapter_loader: GroupLoader,
    ):
        self.channel, self.image_channel, self.adapter_loader = channel, image_channel, adapter_loader
        self._scheduler, self._tiers = scheduler, tiers
        self._adapter_calls: dict[int, str] = {}  # ids of LoadAdapter, by the number of the command
        self._resting: dict[bool, list[str]] = {False: [], True: []}  # engines to which links have failed, of images
        self._notices: list[Notice] = []
        #: Actions for other engines and commands to the tiers, by the plan that made them, each with the number of
        #: steps that must end first.
        self.reserved: deque[tuple[int, list[HandoffOutput], list[TierCommand]]] = deque()

    @property
    def is_awaited(self) -> bool:
        """Whether an adapter or blocks are on their way that let a request start."""
        return self.adapter_loader.loading or self._scheduler.offloading.moving

    # -- in ------------------------------------------------------------------------------------------------

    def arrived(self) -> Iterator[PartInput]:
        """Yield what has come since the last call, in the order in which the scheduler must be given it. Raises
        EngineUnavailable like HandoffChannel.events."""
        answers = [*self._tiers.answers()]
        if answers or self._scheduler.offloading.loaded:
            yield TiersAnswered(answers)
        for number, error in self.adapter_loader.finished():
            yield AdapterRead(number, error)
            if call_id := self._adapter_calls.pop(number, None):
                self._notices.append(AdapterLoaded(call_id, None if error is None else ErrorInfo.of(error)))
        for channel, of_images in ((self.image_channel, True), (self.channel, False)):
            if (resting := [*channel.quarantined()]) != self._resting[of_images]:
                self._resting[of_images] = resting
                yield LinksRest(resting, of_images)
        yield from map(ImageWentOn, self.image_channel.events())
        yield from map(HandoffWentOn, self.channel.events())

    # -- out -----------------------------------------------------------------------------------------------

    def load_adapter(self, lora: LoRARequest, call_id: str, now: float) -> None:
        """Start to read an adapter into host memory on all ranks. `take_notices` returns the outcome later. Raises
        AdapterError."""
        self._adapter_calls[self._scheduler.apply(AdapterNumbered(lora), now)] = call_id

    def load_adapters(self) -> None:
        """Have the ranks load the adapters that the scheduler needs."""
        for load in self._scheduler.adapters.take_loads():
            self.adapter_loader.load(load)

    def reserve(self, num_launched: int, now: float) -> None:
        """Hold what the newest plan sends out until so many steps have ended. A block just reserved for KV from
        elsewhere may have belonged to an ended sequence that the steps in flight still write for."""
        actions, commands = self._scheduler.handoffs.actions, self._take_commands(now)
        if actions or commands:
            self.reserved.append((num_launched, [*actions], commands))
            actions.clear()

    def submit(self, ended: int, now: float) -> None:
        """Pass on what may go once `ended` steps have ended, and queue notices for the control actor."""
        while self.reserved and self.reserved[0][0] <= ended:
            _, actions, commands = self.reserved.popleft()
            self._tiers.submit(commands)
            self._submit(self.channel, actions)
        if not self.reserved:  # else these would overtake the reserved ones
            self._tiers.submit(self._take_commands(now))
            if actions := self._scheduler.handoffs.actions:
                self._submit(self.channel, actions)
        if actions := self._scheduler.images.handoffs.actions:
            self._submit(self.image_channel, actions)

    def _submit(self, channel: HandoffChannel | NoChannel, actions: list[HandoffOutput]) -> None:
        submitted = []
        for action in actions:
            if isinstance(action, DispatchRemote | CancelDispatch):
                self._notices.append(action)
            else:
                submitted.append(action)
        actions.clear()
        if submitted:
            channel.submit(*submitted)

    def _take_commands(self, now: float) -> list[TierCommand]:
        scheduler = self._scheduler
        commands: list[TierCommand] = scheduler.apply(CommandsTaken(), now) if scheduler.offloading.tiers else []
        return commands

    def take_notices(self) -> list[Notice]:
        """Return the messages for the control actor queued since the last call."""
        notices, self._notices = self._notices, []
        return notices
