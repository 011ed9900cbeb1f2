"""Converts text to token ids and back, with the files of a model folder. Imports no torch, so that an ingress starts
fast."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers

from engine.errors import PromptTooLong, RequestError
from engine.text.tokenizer_files import decoder_steps, is_of_tokenizers, read_tokenizer

NFC_SHRINKS = 3  # at most this many bytes become one when characters are composed
CUT_TOKENS = 64  # extra tokens kept when a text is cut before tokenizing, since tokens near the cut may differ


class Tokenizer:
    """A `tokenizers` tokenizer, and the bytes of each of its tokens."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self._bytes: dict[int, bytes] = {}
        self._added = backend.get_added_tokens_decoder()

    @classmethod
    def from_folder(cls, folder: Path, decodes: bool = True) -> Self:
        """Read a model folder. decodes: as in `read_tokenizer`. Raises ModelFolderError."""
        return cls(read_tokenizer(folder, decodes))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens).ids

    def encode_prompt(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises PromptTooLong; for a text that is certainly too long, before
        tokenizing it."""
        self.check_length(text, max_model_len)
        encoding = self._encode(text, add_special_tokens)
        if len(encoding) >= max_model_len:
            raise PromptTooLong(len(encoding), max_model_len)
        return encoding.ids

    def count_before(self, text: str, offsets: Sequence[int], add_special_tokens: bool) -> list[int]:
        """Return how many tokens of a text end at or before each of these characters."""
        with _failing():
            encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ends = [end for _, end in encoding.offsets]
        return [bisect_right(ends, offset) for offset in offsets]

    def encode_truncated(
        self, text: str, max_tokens: int, side: Literal["left", "right"], add_special_tokens: bool = True
    ) -> list[int]:
        """Return the last `max_tokens` tokens of a text, or the first for side `right`. With a known `max_token_bytes`
        the time depends on `max_tokens`, not on the length of the text."""
        token_ids = self.encode(self.cut(text, max_tokens, side), add_special_tokens)
        return token_ids[:max_tokens] if side == "right" else token_ids[-max_tokens:]

    def check_length(self, text: str, max_model_len: int, *, answer: bool = True, field: str = "prompt") -> None:
        """Raise PromptTooLong for a text that would be too long even if all of its tokens were the longest token.

        answer: whether output tokens will follow the text. field: the text's name in the error.
        """
        if self.max_token_bytes is not None:
            at_least = len(text.encode()) // self.max_token_bytes
            if at_least + answer > max_model_len:
                raise PromptTooLong(at_least, max_model_len, True, answer, field)

    def cut(self, text: str, max_tokens: int, side: Literal["left", "right"] = "right") -> str:
        """Return a part of a text that contains its first `max_tokens` tokens, or its last ones for side `left`.
        Returns all of it if the length of a token has no bound."""
        if self.max_token_bytes is None:
            return text
        num_chars = (max_tokens + CUT_TOKENS) * self.max_token_bytes
        return text[:num_chars] if side == "right" else text[-num_chars:]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling; None if there is none."""
        return self.backend.token_to_id(token)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        # a batch, because only batch calls release the GIL
        with _failing():
            return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def token(self, token_id: int) -> str | None:
        """Return a token in the vocabulary's spelling; None for an unknown id."""
        return self.backend.id_to_token(token_id)

    def bad_words_token_ids(self, words: list[str]) -> list[list[int]]:
        """Tokenize each word as at the start of a text, and also as after a space if that differs."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        encodings = self.encode_all(texts, add_special_tokens=False)
        return [list(token_ids) for token_ids in dict.fromkeys(tuple(encoding.ids) for encoding in encodings)]

    def is_special(self, token_id: int) -> bool:
        """Return whether a token controls the model (an end of turn, for instance) and is not text."""
        return token_id in self._added and self._added[token_id].special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token inside a text, often part of a character; empty for an unknown id."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._compute_bytes(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for bytes that are not a whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Maximum number of bytes of text that become one token; None if it is unknown or unbounded.

        Takes about a second to compute for a large vocabulary.
        """
        state = json.loads(self.backend.to_str())
        normalizers, splits = _steps(state["normalizer"]), _steps(state["pre_tokenizer"])
        fallback = "ByteLevel" in self._decoder_steps or state["model"].get("byte_fallback")
        swallows_spaces = any(token.lstrip or token.rstrip for token in self._added.values())
        if not fallback or swallows_spaces or not all(_keeps_text(step) for step in normalizers + splits):
            return None
        longest = max(len(self._compute_bytes(token_id)) for token_id in self.backend.get_vocab().values())
        return longest * (NFC_SHRINKS if any(step["type"] == "NFC" for step in normalizers) else 1)

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Tokenize texts. Raises RequestError where the model's tokenizer fails."""
        # a batch, because only batch calls release the GIL: `encode` holds it for seconds if the text is long
        with _failing():
            return self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)

    @cached_property
    def _decoder_steps(self) -> list[str]:
        return decoder_steps(self.backend)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_steps:
            # an added token, or one outside the byte alphabet, is plain text, as in `tokenizers`
            if token_id in self._added or any(char not in _BYTE_OF_CHAR for char in token):
                return token.encode()
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if "ByteFallback" in self._decoder_steps and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        decode, before, after = self._between
        return decode(["a", token, "a"]).removeprefix(before).removesuffix(after).encode()

    @cached_property
    def _between(self) -> tuple[Callable[[list[str]], str], str, str]:
        """The decoding function, and the text that the token `a` has as the first token and as the last."""
        decode = " ".join if self.backend.decoder is None else self.backend.decoder.decode
        before = decode(["a"])
        return decode, before, decode(["a", "a"]).removeprefix(before)


@contextmanager
def _failing() -> Iterator[None]:
    """Raise RequestError where the model's tokenizer fails with a text, for instance since a pattern takes too long."""
    try:
        yield
    except BaseException as error:  # of which panics of Rust derive
        if not is_of_tokenizers(error):
            raise
        reason = " ".join(str(error).split())
    else:
        return
    raise RequestError(f"the model's tokenizer fails with this text: {reason}", "prompt")


def _steps(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, flattened if it is a sequence."""
    if state is None:
        return []
    parts = state.get("normalizers") or state.get("pretokenizers")
    return [state] if parts is None else [step for part in parts for step in _steps(part)]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a normalizer or pre-tokenizer never drops text."""
    match step:
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": " "}, "content": content}:
            return content != ""
        case _:
            return step["type"] in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable Latin-1 bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_of_char()
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
