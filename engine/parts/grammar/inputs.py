"""What enters a scheduler for its grammars."""

from __future__ import annotations

from typing import Any

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.parts.grammar.grammars import Grammars


class GrammarSet(PartInput, frozen=True):
    """The compiled grammar that a request was waiting for. It makes the request ready to run."""

    request_id: str
    grammar: Any
    """A Constraint."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[Grammars].constrain(scheduler.queue.live[self.request_id], self.grammar)
