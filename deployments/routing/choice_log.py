"""The newest choices of a router, in a bounded number of bytes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import msgspec

from deployments.routing.choice_record import RecordedChoice, RecordedEngine, RouterTape
from deployments.routing.cost import EngineCandidate
from deployments.routing.policies import Lookup
from deployments.routing.prompt_digest import PromptDigest


class NoChoiceLog:
    """Records nothing."""

    def __init__(self) -> None:
        #: Random numbers and orders of the choice that is being made.
        self.drawn: MutableSequence[int] = deque(maxlen=0)
        self.orders: MutableSequence[list[str]] = deque(maxlen=0)

    def watch(self, lookup: Lookup, memory: str) -> Lookup:
        """Begin a choice. Returns a lookup that is to be used for it. memory: that of the policy."""
        return lookup

    def record(self, prompt: PromptDigest, engines: Sequence[str], ranked: Sequence[str], **facts: Any) -> None:
        """Record the choice, with further fields of RecordedChoice."""

    def take(self, router: str) -> list[bytes]:
        """Return the choices so far: a RouterTape in msgpack; nothing if there are none. router: id of its process."""
        return []


class ChoiceLog(NoChoiceLog):
    def __init__(self, max_bytes: int, wall: Callable[[], float] = time.time):
        """wall: returns seconds since 1970."""
        self.drawn, self.orders = [], []
        self._known: dict[str, RecordedEngine] = {}
        self._memory = ""
        self._choices: deque[bytes] = deque()
        self._bytes, self._max_bytes, self._wall = 0, max_bytes, wall
        self._encode = msgspec.msgpack.Encoder().encode
        self._described: dict[str, Any] = {}

    def describe(self, **fields: Any) -> None:
        """Set the fields of the RouterTape besides its choices and its router."""
        self._described = fields

    def watch(self, lookup: Lookup, memory: str) -> Lookup:
        self.drawn.clear()
        self.orders.clear()
        self._known, self._memory = {}, memory

        def watched(engine: str) -> EngineCandidate:
            found = lookup(engine)
            if engine not in self._known:
                self._known[engine] = RecordedEngine.of(found)
            return found

        return watched

    def record(self, prompt: PromptDigest, engines: Sequence[str], ranked: Sequence[str], **facts: Any) -> None:
        choice = RecordedChoice(
            at=self._wall(),
            request_id=prompt.request_id,
            num_tokens=prompt.num_tokens,
            num_blocks=len(prompt.keys),
            images=prompt.images,
            has_session=bool(prompt.session),
            has_adapter=bool(prompt.adapter),
            engines=list(engines),
            memory=self._memory,
            drawn=list(self.drawn),
            orders=list(self.orders),
            known=self._known,
            ranked=list(ranked),
            **facts,
        )
        data = self._encode(choice)
        self._choices.append(data)
        self._bytes += len(data)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._choices.popleft())

    def take(self, router: str) -> list[bytes]:
        choices = list(self._choices)
        return [self._encode(RouterTape(router=router, choices=choices, **self._described))] if choices else []


def choice_log(tape_mib: int) -> NoChoiceLog:
    """Return a log of this size, or none. tape_mib: that of the engines."""
    return ChoiceLog(tape_mib * 2**20) if tape_mib else NoChoiceLog()
