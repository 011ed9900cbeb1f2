"""What enters a scheduler for its adapters."""

from __future__ import annotations

from typing import Self

import msgspec

from engine.core.door.inputs import KernelWithParts
from engine.errors import RequestError
from engine.parts.input_with_text import InputWithText
from engine.parts.kept import adapter_of
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.wire.parts.adapter import ModelAdapter, digest_of


class AdapterNumbered(InputWithText, frozen=True):
    """An adapter to be read into host memory on all ranks. `apply` returns the number of the command."""

    lora: ModelAdapter

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, lora=self.lora.without_text())

    def apply(self, scheduler: KernelWithParts, now: float) -> int:
        return scheduler.parts[AdapterSlots].new_load(self.lora)


class AdapterRead(InputWithText, frozen=True):
    """The command with this number has been carried out. If it has failed, the requests end that wait for the adapter
    in that slot."""

    number: int
    reason: str | None = None
    """Why it has failed on a rank; None if it has not."""

    def without_text(self) -> Self:
        return self if self.reason is None else msgspec.structs.replace(self, reason="as it was recorded")

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        if (lora := scheduler.parts[AdapterSlots].loaded(self.number, failed=self.reason is not None)) is None:
            return
        queue = scheduler.queue.waiting
        for request in [each for each in queue if digest_of(adapter_of(each)) == lora.digest]:
            scheduler.abort(request.request_id, now, RequestError(self.reason or "", "model"))
