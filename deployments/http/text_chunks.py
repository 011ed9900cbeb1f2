"""Encoder for stream chunks that differ only in their text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

MARK = "\0text\0"  # characters that no id or model name contains
_encode = msgspec.json.Encoder().encode


class TextChunks:
    """Encodes the chunk of each choice once, and afterwards only its text, which halves the work per token."""

    def __init__(self, chunk: Callable[[int, str], msgspec.Struct]):
        """chunk: returns the chunk of a choice with a given text."""
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}  # JSON before and after the text, by choice

    def encoded(self, index: int, text: str) -> msgspec.Raw:
        """Return the JSON of a choice's chunk with this text."""
        if index not in self._around:
            before, after = _encode(self._chunk(index, MARK)).split(_encode(MARK))
            self._around[index] = before, after
        before, after = self._around[index]
        return msgspec.Raw(before + _encode(text) + after)
