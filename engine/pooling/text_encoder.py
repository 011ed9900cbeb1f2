"""Tokenizes texts and pairs of texts for models that pool, with their special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from engine.errors import InvalidParameter
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _PairFrame:
    """Special tokens around the two texts of a pair."""

    before: list[int]
    between: list[int]
    after: list[int]
    typed_from: int | None
    """Number of tokens from the end of the first text to the first token of type 1; None if there is none."""


class TextEncoder:
    """Puts a model's special tokens around texts, and cuts these to a length."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._backend = tokenizer, tokenizer.backend

    def encode(
        self, texts: Sequence[str], max_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Tokenize texts, by default with the model's special tokens around each.

        max_tokens: length to which each is cut at its end, special tokens included. Raises InvalidParameter if no text
        would be left.
        """
        if max_tokens is None:
            return [encoding.ids for encoding in self._tokenizer.encode_all(texts, add_special_tokens)]
        added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encodings = self._tokenizer.encode_all(
            [self._tokenizer.cut(text, max_tokens) for text in texts], add_special_tokens=False
        )
        for encoding in encodings:
            if len(encoding) + added > max_tokens:
                encoding.truncate(_left_for_texts(max_tokens, 1, added))
        whole = [self._backend.post_process(each, add_special_tokens=add_special_tokens) for each in encodings]
        return [encoding.ids for encoding in whole]

    def encode_parts(self, texts: Sequence[str], max_tokens: int | None = None) -> list[list[int]]:
        """Tokenize texts for `join_pair`. max_tokens: limit of a pair; much longer texts are already cut here."""
        cut = texts if max_tokens is None else [self._tokenizer.cut(text, max_tokens) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_all(cut, add_special_tokens=False)]

    def join_pair(
        self, first: list[int], second: list[int], max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Join two tokenized texts with the model's special tokens. Returns the token ids and the position at which the
        second text begins, or None if the model has no token types.

        max_tokens: length to which the pair is cut, special tokens included, taking from the longer text first. Raises
        InvalidParameter if no text would be left.
        """
        frame = self._frame
        added = len(frame.before) + len(frame.between) + len(frame.after)
        if max_tokens is not None and len(first) + len(second) + added > max_tokens:
            kept = _left_for_texts(max_tokens, 2, added)
            short = min(len(first), len(second), kept // 2)
            longer = len(first) > len(second)
            first, second = first[: kept - short if longer else short], second[: short if longer else kept - short]
        token_ids = frame.before + first + frame.between + second + frame.after
        if frame.typed_from is None:
            return token_ids, None
        begin = len(frame.before) + len(first) + frame.typed_from
        return token_ids, begin if begin < len(token_ids) else None

    @cached_property
    def _frame(self) -> _PairFrame:
        empty, first, second = self._tokenizer.encode_all(["", "a", "b"], add_special_tokens=False)
        special = self._backend.post_process(empty, empty).ids

        def num_before(encoding: tokenizers.Encoding, joined: list[int]) -> int:
            """Return how many special tokens precede a text."""
            counts = range(len(special) + 1)
            return next(i for i in counts if joined == special[:i] + encoding.ids + special[i:])

        begin = num_before(first, self._backend.post_process(first, empty).ids)
        end = num_before(second, self._backend.post_process(empty, second).ids)
        types = self._backend.encode_batch_fast([("a", "b")])[0].type_ids
        typed_from = types.index(1) - begin - len(first) if 1 in types else None
        return _PairFrame(special[:begin], special[begin:end], special[end:], typed_from)


def _left_for_texts(max_tokens: int, num_texts: int, num_special: int) -> int:
    """Return how many tokens remain for the texts besides special ones. Raises InvalidParameter if there is less than
    one for each."""
    if max_tokens - num_special < num_texts:
        raise InvalidParameter("truncate_prompt_tokens", max_tokens, f"at least {num_special + num_texts} here")
    return max_tokens - num_special
