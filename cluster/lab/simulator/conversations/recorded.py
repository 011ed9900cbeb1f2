"""Conversations of a file whose turns have times or pauses."""

from __future__ import annotations

from typing import Annotated

import msgspec

from cluster.lab.simulator.conversations.dialogue import Ask, Dialogue, Ids

Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class RecordedDialogue(Dialogue):
    """A dialogue that begins at the time of its first turn."""

    def __init__(self, ids: Ids, session: int, began_ms: float):
        super().__init__(ids, session, began_ms / 1000)
        self._newest_ms = began_ms

    def ask_at(self, output_tokens: int, timestamp: Milliseconds | None, delay: Milliseconds | None) -> Ask:
        """Return the request for an answer, as `ask`. It comes `delay` after the answer before or, if that is missing,
        after the time between the two newest timestamps."""
        passed = 0.0 if timestamp is None else max(0.0, timestamp - self._newest_ms)
        self._newest_ms = self._newest_ms if timestamp is None else timestamp
        return self.ask(output_tokens, (passed if delay is None else delay) / 1000)


class RecordedDialogues:
    """The dialogues of a file, by the names of their sessions."""

    def __init__(self, ids: Ids):
        self._ids = ids
        self._begun: dict[str, RecordedDialogue] = {}

    def of(self, session: str, timestamp: Milliseconds | None) -> RecordedDialogue:
        """Return that of a session. timestamp: of its first turn, if it begins now."""
        if session not in self._begun:
            self._begun[session] = RecordedDialogue(self._ids, len(self._begun), timestamp or 0.0)
        return self._begun[session]
