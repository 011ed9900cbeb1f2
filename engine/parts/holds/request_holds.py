"""The holds that one request asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.request import Request
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.holds import HoldMark, PromptHold
from engine.wire.remote_request import RemoteRequest

NOTHING = PromptHold(marks=[])


@dataclass(slots=True)
class RequestHolds:
    client: str = ""
    name: str = ""
    response_id: str = ""
    marks: list[HoldMark] = field(default_factory=list)
    """Marks that have not been decided yet, ascending."""
    renews: bool = True
    """Whether the request renews the holds that it reads: not if it only moves one from another engine."""

    @classmethod
    def of(cls, asked: GenerateRequest | RemoteRequest, num_prompt: int) -> RequestHolds:
        """Return what a request asks for. num_prompt: length of its prompt, in which all marks are."""
        if isinstance(asked, RemoteRequest):
            return cls()
        hold = asked.record(PromptHold) or NOTHING
        marks = [HoldMark(min(mark.tokens, num_prompt), mark.ttl_s, mark.left_s) for mark in hold.marks]
        marks.sort(key=lambda mark: mark.tokens)
        renews = all(mark.left_s is None for mark in marks)
        return cls(asked.client, hold.name, hold.response_id, marks, renews)

    def take_marks(self, computed: int) -> list[HoldMark]:
        """Return the marks within the first `computed` tokens that no earlier call has returned."""
        taken = [mark for mark in self.marks if mark.tokens <= computed]
        self.marks = self.marks[len(taken) :]
        return taken


def holds_of(request: Request) -> RequestHolds:
    found: RequestHolds = request.of[PromptHold.part]
    return found
