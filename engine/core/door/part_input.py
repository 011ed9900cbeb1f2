"""What enters a scheduler for one of its parts."""

from __future__ import annotations

from typing import Any, Protocol

from engine.core.door.inputs import Input
from engine.core.door.kernel import Kernel
from engine.core.door.part import Parts


class KernelWithParts(Kernel, Protocol):
    """A scheduler with its parts."""

    parts: Parts


class PartInput(Input, frozen=True):
    """An input for a part. `Scheduler.apply` returns what the part answers."""

    def apply(self, scheduler: KernelWithParts, now: float) -> Any:
        """Pass the input on to the part of a scheduler for which it is."""
        raise NotImplementedError


class TimePassed(PartInput, frozen=True):
    """Parts go on in an engine that plans no more steps."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        for update in scheduler.parts.update:
            update(now)
