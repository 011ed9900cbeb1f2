"""Carries messages between a scheduler's parts and their other ends: engines, tiers, adapters, the control actor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.core.door.inputs import Input
from engine.core.features.adapter_slots import AdapterSlots
from engine.core.features.block_events import KVEvents, NoKVEvents
from engine.core.features.handoffs.handoffs import Handoffs
from engine.core.features.kv_offloading import KVOffloading
from engine.core.features.part_inputs import (
    AdapterNumbered,
    AdapterRead,
    AddedRemote,
    HandoffWentOn,
    ImageWentOn,
    LinksRest,
    TiersAnswered,
    TimePassed,
)
from engine.core.mail.compilations import Compilations
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.errors import ServingError
from engine.kv_offload.group_tiers import GroupTiers, NoTiers
from engine.kv_transfer.no_channel import NoChannel
from engine.lora.group_loader import GroupLoader
from engine.wire.handoff import AcceptPrefill, RefusePrefill
from engine.wire.lora import LoRARequest
from engine.wire.messages import AdapterLoaded, CancelDispatch, DispatchRemote
from engine.wire.remote_request import RemoteRequest
from engine.wire.token_delta import ErrorInfo

if TYPE_CHECKING:  # it needs pyzmq
    from engine.kv_transfer.channel import HandoffChannel

logger = logging.getLogger(__name__)

FLUSH_S = 5.0  # that `flush` waits for the disk
FLUSH_POLL_S = 0.002

Notice = DispatchRemote | CancelDispatch | AdapterLoaded
"""A message for the control actor."""


class PartMail:
    """Delivers what parts send, and gives what comes for them. Used by the thread of the step loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        grammars: Compilations,
        channel: HandoffChannel | NoChannel,
        image_channel: HandoffChannel | NoChannel,
        tiers: GroupTiers | NoTiers,
        adapter_loader: GroupLoader,
        kv_events: KVEvents | NoKVEvents,
    ):
        self.grammars, self.channel, self.image_channel, self.adapter_loader = (
            grammars, channel, image_channel, adapter_loader
        )  # fmt: skip
        self._scheduler, self._tiers, self.kv_events = scheduler, tiers, kv_events
        self._adapter_calls: dict[int, str] = {}  # ids of LoadAdapter, by the number of the command
        self._resting: dict[bool, list[str]] = {False: [], True: []}  # engines to which links have failed, of images
        self._notices: list[Notice] = []

    @property
    def is_awaited(self) -> bool:
        """Whether a grammar, an adapter or blocks are on their way that let a request start."""
        offloading = self._scheduler.parts.get(KVOffloading)
        moving = offloading is not None and offloading.moving
        return bool(self.grammars.running) or self.adapter_loader.loading or moving

    def arrived(self, now: float) -> Iterator[Input]:
        """Yield what has come since the last call, in the order in which the scheduler must be given it. Raises
        EngineUnavailable like HandoffChannel.events."""
        yield from self.grammars.finished(now)
        if answers := [*self._tiers.answers()]:
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

    def add_remote(self, asked_by: RemoteRequest, now: float) -> Request | None:
        """Queue a prompt that another engine asked for, or return None if it is refused. That engine is told."""
        try:
            self._scheduler.parts[Handoffs].for_others.check(asked_by)
            request: Request = self._scheduler.apply(AddedRemote(asked_by), now)
        except ServingError as error:
            logger.warning("refused a prefill request handoff_id=%s reason=%s", asked_by.handoff_id, error)
            self.channel.submit(RefusePrefill(asked_by, str(error)))
            return None
        self.channel.submit(AcceptPrefill(asked_by))
        return request

    def check_adapter(self, lora: LoRARequest) -> None:
        """Wait until rank 0 has read an adapter. Raises AdapterError if requests cannot use it."""
        self._scheduler.parts[AdapterSlots].check_adapter(lora)
        self.adapter_loader.check(lora)

    def load_adapter(self, lora: LoRARequest, call_id: str, now: float) -> None:
        """Start to read an adapter into host memory on all ranks. `take_notices` returns the outcome later. Raises
        AdapterError."""
        self._adapter_calls[self._scheduler.apply(AdapterNumbered(lora), now)] = call_id

    def deliver(self) -> None:
        """Deliver what may go now. Messages for the control actor are kept for `take_notices`."""
        take = self._scheduler.take_messages
        for load in take("adapters"):
            self.adapter_loader.load(load)
        if commands := take("tiers"):
            self._tiers.submit(commands)
        if actions := take("engines"):
            self.channel.submit(*actions)
        if actions := take("encode engines"):
            self.image_channel.submit(*actions)
        self._notices += take("control")

    def flush(self, now: Callable[[], float]) -> None:
        """Write to the tiers the blocks that wait to be stored, and then their holds. Takes FLUSH_S at most. now: the
        engine's clock."""
        deadline, offloading = now() + FLUSH_S, self._scheduler.parts.get(KVOffloading)
        while now() < deadline:
            for given in (*self.arrived(now()), TimePassed()):
                self._scheduler.apply(given, now())
            self.deliver()
            if offloading is None or offloading.flushed():
                return
            time.sleep(FLUSH_POLL_S)

    def close(self) -> None:
        self.kv_events.close()
        self.grammars.close()
        self.channel.close()
        self.image_channel.close()

    def take_notices(self) -> list[Notice]:
        """Return the messages for the control actor queued since the last call."""
        notices, self._notices = self._notices, []
        return notices
