"""What enters a scheduler: records that `Scheduler.apply` takes. No other way leads in but the two halves of a step.

A tape keeps every input, and a replay gives it again (tape/). So an input holds all of the outside world that the
decision depends on.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from engine.core.door.kernel import Kernel
from engine.core.door.part import Parts
from engine.wire.generate_request import GenerateRequest
from engine.wire.token_delta import FinishReason


class Input(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something that a scheduler is given. A tape keeps the record as it is, unless tape/inputs.py has a form for it
    that says nothing of texts."""


class Added(Input, frozen=True):
    """A request. `apply` returns it as the scheduler keeps it, or raises a ServingError and changes nothing."""

    message: GenerateRequest


class Aborted(Input, frozen=True):
    """A request ends now, if it is live: it may just have finished.

    A request whose blocks another engine reads ends once that engine has stopped.
    """

    request_id: str
    reason: FinishReason = "abort"
    error: Any = None  #: the ServingError with which it ends instead of the reason


class CacheCleared(Input, frozen=True):
    """Empties the prefix cache and the tiers below it, and ends all holds."""


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
