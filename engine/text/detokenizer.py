"""Turns token ids into text, token by token, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import msgspec


class TokenBytes(Protocol):
    """The methods of a tokenizer that detokenizing needs."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class DecodedText(msgspec.Struct, frozen=True, gc=False):
    """Text released by one call of `Detokenizer.add`. A msgspec struct, because a stream makes one per token."""

    text: str
    offsets: list[int]  #: for each token taken, the number of characters before it


class Detokenizer:
    """Turns one sequence's tokens into text.

    It never releases part of a character, nor text that may turn out to begin a stop string. Invalid UTF-8 becomes
    U+FFFD, once it is certain to be invalid. How tokens are grouped into calls does not change the text.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: list[str] | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        """min_tokens: number of tokens before which stop strings are ignored."""
        self.stopped_by: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop = stop or []
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._in_character = False  # whether the bytes so far end inside a character
        self._held = ""
        self._length = 0  # characters decoded so far, held ones included

    def add(self, token_ids: list[int], *, hide_last: bool = False) -> DecodedText:
        """Take tokens up to the one that completes a stop string, and ignore the rest. `stopped_by` is then that
        string. hide_last: whether the last token ends the sequence and is not part of the text."""
        text, offsets = [], []
        for i, token_id in enumerate(token_ids):
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            offsets.append(self._length)
            hidden = (hide_last and i == len(token_ids) - 1) or (
                self._skip_special_tokens and self._tokenizer.is_special(token_id)
            )
            if not hidden:
                text.append(self._release(self._decode(self._tokenizer.token_bytes(token_id))))
        return DecodedText("".join(text), offsets)

    def finish(self) -> str:
        """Return the text still held back. Call it when no token follows; an incomplete character becomes U+FFFD."""
        if self.stopped_by is not None:
            return ""
        rest = self._release(self._utf8.decode(b"", final=True))
        if self.stopped_by is None:
            rest, self._held = rest + self._held, ""
        return rest

    def _decode(self, data: bytes) -> str:
        if not self._in_character and data.isascii():  # Python's decoder takes ten times as long
            return data.decode()
        text = self._utf8.decode(data)
        self._in_character = bool(self._utf8.getstate()[0])
        return text

    def _release(self, new: str) -> str:
        self._length += len(new)
        if not self._stop:
            return new
        text = self._held + new
        if self.num_tokens < self._min_tokens:
            self._held = ""
            return text
        if (match := self._first_match(text)) is not None:
            self.stopped_by, start = match
            self._held = ""
            return text[: start + len(self.stopped_by)] if self._include_stop else text[:start]
        keep = start_of_possible(self._stop, text)
        self._held = text[keep:]
        return text[:keep]

    def _first_match(self, text: str) -> tuple[str, int] | None:
        """Return the stop string that ends first (the longer one if two end together) and where it starts."""
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        _, start, stop = min(found, default=(0, 0, ""))
        return (stop, start) if found else None


def start_of_possible(markers: Sequence[str], text: str) -> int:
    """Return the start of the longest suffix of `text` that may begin one of `markers`; len(text) if there is none."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
