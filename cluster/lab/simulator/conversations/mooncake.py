"""Reads Mooncake's traces, and what AIPerf adds to them: a line of JSON for each request.

Mooncake (arXiv:2407.00079; kvcache-ai/Mooncake, FAST25-release/README.md) has `timestamp` in ms, `input_length`,
`output_length` and `hash_ids`, one for each 512 tokens. AIPerf (`MooncakeTrace` in ai-dynamo/aiperf,
src/aiperf/dataset/loader/models.py) also has `session_id` and `delay`, in ms after the answer before, and
`text_input`, `messages` or a `payload` in place of `input_length`. Lines of a session are what is new in each of its
turns, but for `messages` without `message_mode: delta` and payloads, which are whole prompts (its
page conversation-context-mode.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from cluster.lab.simulator.conversations.dialogue import ID_LIMIT, MAX_TOKENS, Ask, Ids
from cluster.lab.simulator.conversations.json_objects import decode
from cluster.lab.simulator.conversations.recorded import Milliseconds, RecordedDialogues
from cluster.lab.simulator.conversations.texts import OUTPUT_TOKENS, say_texts
from engine.errors import InvalidParameter

PIECE = 512  # tokens per hash id


class Message(msgspec.Struct, frozen=True):
    role: str
    content: Any = ""

    @property
    def text(self) -> tuple[str, str]:
        """Role and content; parts of a content count as their JSON."""
        text = self.content if isinstance(self.content, str) else msgspec.json.encode(self.content).decode()
        return self.role, text


class Payload(msgspec.Struct, frozen=True):
    messages: list[Message] = []
    prompt: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: Milliseconds | None = None
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] | None = None
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=ID_LIMIT)]] = []
    session_id: str | None = None
    delay: Milliseconds | None = None
    text_input: str | None = None
    messages: list[Message] | None = None
    message_mode: Literal["history", "delta"] = "history"
    payload: Payload | None = None

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Role and content of each text."""
        if self.payload is not None:
            return [message.text for message in self.payload.messages] or [("", self.payload.prompt)]
        if self.messages is not None:
            return [message.text for message in self.messages]
        return [("", self.text_input or "")]

    @property
    def is_whole(self) -> bool:
        """Whether it has the prompt, and not only what is new."""
        return self.payload is not None or (self.messages is not None and self.message_mode == "history")

    @property
    def output_tokens(self) -> int:
        told = self.output_length
        if told is None and self.payload is not None:
            told = self.payload.max_completion_tokens or self.payload.max_tokens
        return OUTPUT_TOKENS if told is None else max(1, min(told, MAX_TOKENS))


def read(lines: Iterable[tuple[str, bytes]], ids: Ids) -> list[Ask]:
    """Return the requests of all lines. Raises InvalidParameter."""
    asks: list[Ask] = []
    talks = RecordedDialogues(ids)
    for place, data in lines:
        line = decode(MooncakeLine, place, data)
        _check(place, line)
        if line.session_id is None and line.input_length is not None:
            asks.append(Ask((line.timestamp or 0.0) / 1000, line.input_length, line.output_tokens, [*line.hash_ids]))
            continue
        talk = talks.of(line.session_id or place, line.timestamp)  # a line of none is one by itself
        if line.is_whole:
            talk.forget()
        if line.input_length is None:
            say_texts(talk, ids, line.texts)
        else:
            talk.say(_pieces(line.input_length, line.hash_ids, ids))
        asks.append(talk.ask_at(line.output_tokens, line.timestamp, line.delay))
    if any(ask.pieces for ask in asks):
        for ask in asks:
            if ask.session is None:
                ask.pieces += [ids.new() for _ in range(-(-ask.prompt_tokens // PIECE) - len(ask.pieces))]
    return asks


def _pieces(tokens: int, hash_ids: list[int], ids: Ids) -> list[int]:
    """Return the pieces of so many tokens, of which the last may be shorter."""
    sizes = [min(PIECE, tokens - at) for at in range(0, tokens, PIECE)]
    known = [ids.of((hash_id, size), size) for hash_id, size in zip(hash_ids, sizes, strict=False)]
    return [*known, *(ids.new(size) for size in sizes[len(known) :])]


def _check(place: str, line: MooncakeLine) -> None:
    """Raise InvalidParameter for a line without a field that it needs, or with two that exclude each other."""
    prompts = {
        name: getattr(line, name)
        for name in ("input_length", "text_input", "messages", "payload")
        if getattr(line, name) is not None
    }
    if len(prompts) != 1:
        names = " and ".join(prompts) or "none"
        raise InvalidParameter(place, names, "a request with one of input_length, text_input, messages and payload")
    if line.input_length is not None and line.output_length is None:
        raise InvalidParameter(f"{place}, output_length", None, "given beside input_length")
    if line.session_id is None and line.timestamp is None:
        raise InvalidParameter(f"{place}, timestamp", None, "given, or session_id")
