"""The chunks of a stream in which nothing but the text differs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

MARK = "\0text\0"  # no id or name of a model has such characters
_encode = msgspec.json.Encoder().encode


class TextChunks:
    """Encodes the chunk of each choice once, and then its text alone: that is half the work of a token."""

    def __init__(self, chunk: Callable[[int, str], msgspec.Struct]):
        """chunk: makes the chunk of a choice with a text."""
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the text, by choice

    def encoded(self, index: int, text: str) -> msgspec.Raw:
        """Return the JSON of a choice's chunk with this text."""
        if index not in self._around:
            before, after = _encode(self._chunk(index, MARK)).split(_encode(MARK))
            self._around[index] = before, after
        before, after = self._around[index]
        return msgspec.Raw(before + _encode(text) + after)
