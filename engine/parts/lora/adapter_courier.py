"""Carries the loads of adapters to all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.door.inputs import Input
from engine.core.mail.courier import Courier, TakeMessages
from engine.lora.group_loader import GroupLoader
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.lora.inputs import AdapterRead
from engine.wire.generate_request import GenerateRequest
from engine.wire.lora import LoRARequest
from engine.wire.messages import AdapterLoaded
from engine.wire.token_delta import ErrorInfo


class AdapterCourier(Courier):
    def __init__(self, slots: AdapterSlots, loader: GroupLoader):
        self._slots, self._loader = slots, loader
        self._calls: dict[int, str] = {}  # ids of LoadAdapter, by the number of the command

    @property
    def is_awaited(self) -> bool:
        return self._loader.loading

    def check(self, message: GenerateRequest, now: float) -> None:
        if message.lora is not None:
            self.check_adapter(message.lora)

    def check_adapter(self, lora: LoRARequest) -> None:
        """Wait until rank 0 has read an adapter. Raises AdapterError if requests cannot use it."""
        self._slots.check_adapter(lora)
        self._loader.check(lora)

    def call(self, number: int, call_id: str) -> None:
        """Send the outcome of a command to the control actor. call_id: id of its LoadAdapter."""
        self._calls[number] = call_id

    def arrived(self, now: float) -> Iterator[Input]:
        for number, error in self._loader.finished():
            yield AdapterRead(number, error)
            if call_id := self._calls.pop(number, None):
                self.notices.append(AdapterLoaded(call_id, None if error is None else ErrorInfo.of(error)))

    def deliver(self, take: TakeMessages) -> None:
        for load in take("adapters"):
            self._loader.load(load)
