"""Loads adapters into the memory of all ranks of an engine, as directed by rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.distributed.no_broadcaster import NoBroadcaster
from engine.errors import RequestError
from engine.lora.adapter_loader import AdapterLoader
from engine.lora.messages import AdapterAnswer, AdapterLoad
from engine.wire.parts.adapter import ModelAdapter

if TYPE_CHECKING:  # it needs pyzmq
    from engine.distributed.plan_broadcast import PlanBroadcaster

CHECK_TIMEOUT_S = 60.0


class GroupLoader:
    """Loads adapters on all ranks. An adapter is available once every rank has it. If any rank cannot load it, it
    counts as missing on all; the requests for that adapter end, and no others do."""

    def __init__(self, loader: AdapterLoader, ranks: int, broadcaster: PlanBroadcaster | NoBroadcaster):
        """loader: loader of this rank."""
        self._loader, self._ranks, self._broadcaster = loader, ranks, broadcaster
        self._answers: dict[int, list[AdapterAnswer]] = {}  # by the command's number

    @property
    def loading(self) -> bool:
        return bool(self._answers)

    def load(self, command: AdapterLoad) -> None:
        self._answers[command.number] = []
        self._broadcaster.command(command)
        self._loader.load(command)

    def finished(self) -> list[tuple[int, RequestError | None]]:
        """Return the commands that all ranks have answered since the last call, as (number, error). If several ranks
        failed, the error is that of one of them."""
        if not self._answers:
            return []
        for answer in [*self._loader.answers(), *self._broadcaster.take_answers(AdapterAnswer)]:
            self._answers[answer.number].append(answer)
        done = [number for number, answers in self._answers.items() if len(answers) == self._ranks]
        return [(number, error_of(self._answers.pop(number))) for number in done]

    def check(self, lora: ModelAdapter) -> None:
        """Wait until this rank has read an adapter. Raises AdapterError if the rank cannot use it."""
        self._loader.check(lora).result(CHECK_TIMEOUT_S)


def error_of(answers: list[AdapterAnswer]) -> RequestError | None:
    reason = next((answer.error for answer in answers if answer.error), None)
    return None if reason is None else RequestError(reason, "model")
