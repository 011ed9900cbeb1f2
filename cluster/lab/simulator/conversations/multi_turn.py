"""Reads AIPerf's multi-turn files: a line of JSON for each conversation, with a `session_id` and `turns`.

The fields are those of `MultiTurn` and `SingleTurn` in ai-dynamo/aiperf, src/aiperf/dataset/loader/models.py; that
turns are added to the answers before them is in its page conversation-context-mode.md. A `delay` counts from the answer
before, in ms. A `timestamp`, in ms, sets the first turn's time, and counts from that of the turn before else. A first
turn with the role `system` and nothing but a text begins each prompt, and is no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from cluster.lab.simulator.conversations.dialogue import MAX_TOKENS, Ask, Ids
from cluster.lab.simulator.conversations.json_objects import decode
from cluster.lab.simulator.conversations.recorded import Milliseconds, RecordedDialogues
from cluster.lab.simulator.conversations.texts import OUTPUT_TOKENS, say_texts
from engine.errors import InvalidParameter

MEDIA = ("image", "images", "audio", "audios", "video", "videos")


class NamedTexts(msgspec.Struct, frozen=True):
    contents: list[str]


class SingleTurn(msgspec.Struct, frozen=True):
    text: str | None = None
    texts: list[str | NamedTexts] = []
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    role: str = "user"
    output_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    image: Any = None
    images: Any = None
    audio: Any = None
    audios: Any = None
    video: Any = None
    videos: Any = None

    @property
    def all_texts(self) -> list[str]:
        named = [[each] if isinstance(each, str) else each.contents for each in self.texts]
        return [*([] if self.text is None else [self.text]), *(text for some in named for text in some)]

    @property
    def is_system(self) -> bool:
        return self.role == "system" and self.timestamp is self.delay is self.output_length is None


class MultiTurn(msgspec.Struct, frozen=True):
    turns: Annotated[list[SingleTurn], msgspec.Meta(min_length=1)]
    session_id: str | None = None


def read(lines: Iterable[tuple[str, bytes]], ids: Ids) -> list[Ask]:
    """Return the requests of all lines. Lines of one `session_id` are one conversation. Raises InvalidParameter."""
    asks: list[Ask] = []
    talks = RecordedDialogues(ids)
    for place, data in lines:
        line = decode(MultiTurn, place, data)
        talk = talks.of(line.session_id or place, line.turns[0].timestamp)  # a line of none is one by itself
        for number, turn in enumerate(line.turns):
            _check(place, number, turn)
            say_texts(talk, ids, [(turn.role, text) for text in turn.all_texts])
            if number == 0 and turn.is_system and not talk.after and len(line.turns) > 1:
                continue
            asks.append(talk.ask_at(turn.output_length or OUTPUT_TOKENS, turn.timestamp, turn.delay))
    return asks


def _check(place: str, number: int, turn: SingleTurn) -> None:
    for name in MEDIA:
        if getattr(turn, name):
            raise InvalidParameter(f"{place}, turns[{number}].{name}", "...", "left out: only texts are read")
    if not turn.all_texts:
        raise InvalidParameter(f"{place}, turns[{number}].text", turn.text, "given, or texts")
