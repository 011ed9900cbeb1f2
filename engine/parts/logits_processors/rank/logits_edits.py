"""What the sampling parameters of one sequence change in its logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.wire.plan import NewSequence

NO_PENALTIES = (1.0, 0.0, 0.0)

Array = NDArray[np.int64]


def ids(tokens: Iterable[int]) -> Array:
    return np.array(list(tokens), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Words:
    """Banned words of two or more tokens, split into prefixes and last tokens. n: tokens of all prefixes."""

    token: Array  #: [n]
    back: Array  #: [n], distance of each token from the end of the output; 1 is the newest token
    word: Array  #: [n], the word that each token belongs to
    target: Array  #: [words], an index into `last`
    last: Array  #: last tokens of the words, each once

    @classmethod
    def of(cls, words: list[list[int]]) -> Words:
        sizes = ids(len(word) - 1 for word in words)
        last, target = np.unique(ids(word[-1] for word in words), return_inverse=True)
        return cls(
            token=ids(token for word in words for token in word[:-1]),
            back=np.concatenate([np.arange(size, 0, -1) for size in sizes]),
            word=np.repeat(np.arange(len(words)), sizes),
            target=target,
            last=last,
        )


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """Changes to logits that the sampling parameters of one sequence ask for, as arrays; made once per sequence."""

    num_prompt: int
    allowed: Array | None  #: the only tokens that are not banned
    banned: Array
    words: Words | None
    ends: Array  #: tokens that are banned until the output has `min_tokens` tokens
    min_tokens: int
    biased: Array  #: [n], tokens to which `bias` is added
    bias: NDArray[np.float32]  #: [n]
    penalties: tuple[float, float, float] | None  #: repetition, frequency, presence

    @classmethod
    def of(cls, sequence: NewSequence, eos: frozenset[int]) -> LogitsEdits | None:
        """Return the changes, or None if there are none. eos: tokens that end a generation."""
        params = sequence.params
        words = [word for word in params.bad_words_token_ids if word]
        longer = [word for word in words if len(word) > 1]
        bias = params.logit_bias or {}
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        ends = sorted(eos | set(params.stop_token_ids)) if params.min_tokens else []
        if not (words or bias or ends or params.allowed_token_ids or penalties != NO_PENALTIES):
            return None
        return cls(
            num_prompt=sequence.num_prompt,
            allowed=ids(params.allowed_token_ids) if params.allowed_token_ids else None,
            banned=ids(word[0] for word in words if len(word) == 1),
            words=Words.of(longer) if longer else None,
            ends=ids(ends),
            min_tokens=params.min_tokens,
            biased=ids(bias),
            bias=np.array(list(bias.values()), dtype=np.float32),
            penalties=penalties if penalties != NO_PENALTIES else None,
        )
