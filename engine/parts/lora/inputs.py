"""What enters a scheduler for its adapters."""

from __future__ import annotations

from typing import Any

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.parts.kept import adapter_of
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.wire.parts.adapter import ModelAdapter, digest_of


class AdapterNumbered(PartInput, frozen=True):
    """An adapter to be read into host memory on all ranks. `apply` returns the number of the command."""

    lora: ModelAdapter

    def apply(self, scheduler: KernelWithParts, now: float) -> int:
        return scheduler.parts[AdapterSlots].new_load(self.lora)


class AdapterRead(PartInput, frozen=True):
    """The command with this number has been carried out. If it has failed, the requests end that wait for the adapter
    in that slot."""

    number: int
    error: Any = None
    """A ServingError if it has failed on a rank."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        lora = scheduler.parts[AdapterSlots].loaded(self.number, failed=self.error is not None)
        waiting = (
            [] if lora is None else [r for r in scheduler.queue.waiting if digest_of(adapter_of(r)) == lora.digest]
        )
        for request in waiting:
            scheduler.abort(request.request_id, now, self.error)
