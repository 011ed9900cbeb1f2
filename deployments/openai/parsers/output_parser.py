"""What an answer is made of, in the order in which the model writes it, and what parsers of it have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, frozen=True)
class Reasoning:
    text: str


@dataclass(slots=True, frozen=True)
class Content:
    text: str


@dataclass(slots=True, frozen=True)
class CallStart:
    """A tool call begins; all arguments up to the next one are its own."""

    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """A part of the JSON text of the arguments."""

    text: str


OutputEvent = Reasoning | Content | CallStart | CallArguments
State = Callable[[list[OutputEvent], bool], "State | None"]


class OutputParser(Protocol):
    """Turns text into events; how the text is cut into calls of `add` does not change what they add up to."""

    def add(self, text: str) -> list[OutputEvent]: ...

    def finish(self) -> list[OutputEvent]:
        """What was held back, once no text follows."""
        ...


class BufferedParser(ABC):
    """An OutputParser made of states.

    A state takes from `_buffer` what it can decide on, appends events to its first argument, and returns the next
    state, or None if it needs more text. Its second argument says that there will be no more.
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
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[OutputEvent]:
        out: list[OutputEvent] = []
        while (state := self._state(out, final)) is not None:
            self._state = state
        return out
