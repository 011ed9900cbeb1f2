"""Requests of a trace that is being made, and the pieces of text of which their prompts consist."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

ID_LIMIT = 2**30  # ids of pieces are below
MAX_TOKENS = 10_000_000  # of a prompt or an answer in a file
TOKEN_S = 0.02  # of an answer; only for the times at which turns would come, by which requests are put in order


class Ids:
    """Hands out ids of pieces of text. Pieces with the same id have the same tokens."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  #: tokens of a piece, if it has not as many as the trace says of all
        self._free = iter(range(ID_LIMIT - 1, 0, -1))
        self._answers = count(-1, -1)
        self._named: dict[Hashable, int] = {}

    def new(self, tokens: int | None = None) -> int:
        """Return the id of text that no other prompt has. tokens: None for as many as all have."""
        piece = next(self._free)
        if tokens is not None:
            self.sizes[piece] = tokens
        return piece

    def of(self, name: Hashable, tokens: int | None = None) -> int:
        """Return the id of the text of this name."""
        if name not in self._named:
            self._named[name] = self.new(tokens)
        return self._named[name]

    def answer(self, tokens: int) -> int:
        """Return the id of an answer. It is below 0, until the trace is whole, and the answer's token is known."""
        piece = next(self._answers)
        self.sizes[piece] = tokens
        return piece


@dataclass(slots=True, eq=False)
class Ask:
    """One request."""

    at_s: float  #: seconds from the start of the trace, if nothing before it is late
    prompt_tokens: int
    output_tokens: int
    pieces: list[int] = field(default_factory=list)  #: ids of its prompt; empty if it shares nothing
    session: int | None = None  #: number of its conversation; None if it is of none
    agent: int = 0
    after: list[Ask] = field(default_factory=list)
    think_s: float = 0.0
    answer: int | None = None  #: id of its answer, if later prompts have it

    @property
    def ends_s(self) -> float:
        return self.at_s + self.output_tokens * TOKEN_S


class Dialogue:
    """Prompts that grow by each answer, and by what is said next."""

    def __init__(self, ids: Ids, session: int, at_s: float = 0.0, agent: int = 0, after: Sequence[Ask] = ()):
        """at_s: when it begins, unless it begins after other requests."""
        self.after = [*after]  #: what the next request waits for
        self.tokens = 0  #: of all that was said
        self._ids, self._session, self._agent, self._at_s = ids, session, agent, at_s
        self._pieces: list[int] = []

    @property
    def last(self) -> int | None:
        """The newest piece; None at the beginning."""
        return self._pieces[-1] if self._pieces else None

    def say(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            self._pieces.append(piece)
            self.tokens += self._ids.sizes[piece]

    def forget(self) -> None:
        """Begin an empty prompt."""
        self._pieces, self.tokens = [], 0

    def ask(self, output_tokens: int, think_s: float = 0.0) -> Ask:
        """Return the request for an answer to all that was said, which is part of later ones."""
        answer = self._ids.answer(output_tokens)
        begins_s = max((before.ends_s for before in self.after), default=self._at_s)
        made = Ask(
            begins_s + think_s, self.tokens, output_tokens, [*self._pieces],
            self._session, self._agent, self.after, think_s, answer,
        )  # fmt: skip
        self.say([answer])
        self.after = [made]
        return made
