"""Events that parsers turn the text of a model into, and the base of the parsers."""

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
    """The start of a tool call; all arguments up to the next start belong to it."""

    name: str
    id: str | None = None
    """The id that it must have for the model; None if any will do."""


@dataclass(slots=True, frozen=True)
class CallArguments:
    """A part of the JSON text of the arguments."""

    text: str


OutputEvent = Reasoning | Content | CallStart | CallArguments
State = Callable[[list[OutputEvent], bool], "State | None"]


class OutputParser(ABC):
    """Turns text into events; how the text is cut into calls of `add` does not change what they add up to.

    A parser is made of states. A state takes from `_buffer` what it can decide on, appends events to its first
    argument, and returns the next state, or None if it needs more text. Its second argument says whether the text is
    complete.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._state: State = self._start

    @abstractmethod
    def _start(self, out: list[OutputEvent], final: bool) -> State | None: ...

    def add(self, text: str) -> list[OutputEvent]:
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[OutputEvent]:
        """Return the events that were held back, once no text follows."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        while (state := self._state(out, final)) is not None:
            self._state = state
        return out
