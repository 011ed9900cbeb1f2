"""Events into which parsers turn a model's text, and the base class of parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Reasoning:
    text: str


@dataclass(slots=True, frozen=True)
class Content:
    text: str


@dataclass(slots=True, frozen=True)
class CallStart:
    """Start of a tool call. All arguments up to the next start belong to it."""

    name: str
    id: str | None = None
    """Id that the model requires; None if any id will do."""


@dataclass(slots=True, frozen=True)
class CallArguments:
    """Part of the arguments' JSON text."""

    text: str


OutputEvent = Reasoning | Content | CallStart | CallArguments
State = Callable[[list[OutputEvent], bool], "State | None"]


class OutputParser(ABC):
    """Turns text into events. However the text is split into calls of `add`, the events add up to the same.

    A parser consists of states. A state takes from `_buffer` as much as it can decide on, appends events to its first
    argument, and returns the next state, or None if it needs more text. A state's second argument says whether the text
    is complete.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._cut = False
        self._state: State = self._start

    @abstractmethod
    def _start(self, out: list[OutputEvent], final: bool) -> State | None: ...

    def add(self, text: str) -> list[OutputEvent]:
        self._buffer += text
        return self._run(final=False)

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        """Return the events held back. Call it when no text follows. cut: whether the model would have gone on."""
        self._cut = cut
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        while (state := self._state(out, final)) is not None:
            self._state = state
        return out
