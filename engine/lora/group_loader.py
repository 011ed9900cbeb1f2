"""Brings adapters into the memory of all ranks of an engine, from rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.lora.adapter_loader import AdapterLoader
from engine.wire.lora import AdapterAnswer, AdapterLoad, LoRARequest

if TYPE_CHECKING:  # it needs pyzmq
    from engine.distributed.plan_broadcast import PlanBroadcaster

CHECK_TIMEOUT_S = 60.0


class GroupLoader:
    """An adapter is there once each rank has it. One that any rank cannot load is there on none: its requests end, and
    no others do."""

    def __init__(self, loader: AdapterLoader | None, ranks: int, broadcaster: PlanBroadcaster | None):
        """loader: this rank's; None in an engine without adapters."""
        self._loader, self._ranks, self._broadcaster = loader, ranks, broadcaster
        self._answers: dict[int, list[AdapterAnswer]] = {}  # by the command's number

    @property
    def loading(self) -> bool:
        return bool(self._answers)

    def load(self, command: AdapterLoad) -> None:
        assert self._loader is not None
        self._answers[command.number] = []
        if self._broadcaster is not None:
            self._broadcaster.command(command)
        self._loader.load(command)

    def finished(self) -> list[tuple[int, RequestError | None]]:
        """Return the commands that all ranks have answered since the last call, each with an error of one of them."""
        if not self._answers or self._loader is None:
            return []
        others = [] if self._broadcaster is None else self._broadcaster.take_answers(AdapterAnswer)
        for answer in [*self._loader.answers(), *others]:
            self._answers[answer.number].append(answer)
        done = [number for number, answers in self._answers.items() if len(answers) == self._ranks]
        return [(number, error_of(self._answers.pop(number))) for number in done]

    def check(self, lora: LoRARequest) -> None:
        """Raise AdapterError if this rank cannot use an adapter; waits until it is read."""
        if self._loader is not None:
            self._loader.check(lora).result(CHECK_TIMEOUT_S)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


def error_of(answers: list[AdapterAnswer]) -> RequestError | None:
    reason = next((answer.error for answer in answers if answer.error), None)
    return None if reason is None else RequestError(reason, "model")
