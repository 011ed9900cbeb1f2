"""Carries the loads of adapters to all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.core.door.inputs import Input
from engine.core.mail.courier import Courier, Server, TakeMessages
from engine.errors import ServingError
from engine.lora.errors import AdapterError
from engine.lora.group_loader import GroupLoader
from engine.lora.messages import AdapterLoaded, LoadAdapter
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.lora.inputs import AdapterNumbered, AdapterRead
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Answer
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.token_delta import ErrorInfo


class AdapterCourier(Courier):
    def __init__(self, slots: AdapterSlots, loader: GroupLoader):
        self._slots, self._loader = slots, loader
        self._asked: dict[int, LoadAdapter] = {}  # by the number of the load

    @property
    def is_awaited(self) -> bool:
        return self._loader.loading

    def check(self, message: GenerateRequest, now: float) -> None:
        if (lora := message.record(ModelAdapter)) is not None:
            self.check_adapter(lora)

    def check_adapter(self, lora: ModelAdapter) -> None:
        """Wait until rank 0 has read an adapter. Raises AdapterError if requests cannot use it."""
        self._slots.check_adapter(lora)
        self._loader.check(lora)

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        if not isinstance(command, LoadAdapter):
            return False
        try:
            self._asked[server.core.apply(AdapterNumbered(command.lora))] = command
            server.core.idle = False
        except ServingError as error:
            server.tell(Answer.to(command, AdapterLoaded(ErrorInfo.of(error))))
        return True

    def arrived(self, now: float) -> Iterator[Input]:
        for number, error in self._loader.finished():
            yield AdapterRead(number, None if error is None else error.message)
            if asked := self._asked.pop(number, None):
                loaded = AdapterLoaded(None if error is None else ErrorInfo.of(error))
                self.notices.append(Answer.to(asked, loaded))

    def deliver(self, take: TakeMessages) -> None:
        for load in take("adapters"):
            self._loader.load(load)


class NoAdapterCourier(Courier):
    """Of an engine without adapters."""

    def take(self, command: msgspec.Struct, server: Server) -> bool:
        if not isinstance(command, LoadAdapter):
            return False
        error = AdapterError.without_slots(command.lora.name)
        server.tell(Answer.to(command, AdapterLoaded(ErrorInfo.of(error))))
        return True
