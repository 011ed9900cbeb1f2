"""Changes to logits before sampling, in vLLM's order: bans, minimum length, bias, penalties.

All rows of a step that ask for any are changed together, by operations whose sizes the host knows without looking at
the device, which alone has the newest token: so nothing here waits for it. Only those entries of [rows, vocab] are
touched that change, so that a row costs in proportion to its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.wire.sampling_params import SamplingParams

BANNED = float("-inf")
# Tokens that are counted at a time, in float32: 16 MiB. Above 32 MiB a CPU's allocator fetches memory from the system
# anew at every step, which takes longer than counting.
COUNTERS = 2**22
NEVER = -1  # no token

Array = NDArray[np.int64]
ToDevice = Callable[[NDArray[Any]], Tensor]


@dataclass(frozen=True, slots=True)
class Words:
    """Banned words of two tokens or more, cut in prefixes and last tokens.

    token, back, word: [tokens of all prefixes]: the token, how far from the end of the output it has to stand (1 is the
    newest token), and whose it is. target: [words], an index into `last`. last: the words' last tokens, each once.
    """

    token: Array
    back: Array
    word: Array
    target: Array
    last: Array

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
    """What the parameters of one sequence change, as arrays; made once per sequence.

    allowed: the only tokens that may come, or None. banned: those that never may. ends: those that may not before there
    are `min_tokens`. biased [n] int64 gets bias [n] float32 added. penalties: repetition, frequency, presence, or None.
    """

    allowed: Array | None
    banned: Array
    words: Words | None
    ends: Array
    min_tokens: int
    biased: Array
    bias: NDArray[np.float32]
    penalties: tuple[float, float, float] | None

    @classmethod
    def of(cls, params: SamplingParams, eos: frozenset[int]) -> LogitsEdits | None:
        """None where nothing is to be changed. eos: tokens that end a generation."""
        words = [word for word in params.bad_words_token_ids if word]
        longer = [word for word in words if len(word) > 1]
        bias = params.logit_bias or {}
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        edits = cls(
            allowed=ids(params.allowed_token_ids) if params.allowed_token_ids else None,
            banned=ids(word[0] for word in words if len(word) == 1),
            words=Words.of(longer) if longer else None,
            ends=ids(sorted(eos | set(params.stop_token_ids)) if params.min_tokens else ()),
            min_tokens=params.min_tokens,
            biased=ids(bias),
            bias=np.array(list(bias.values()), dtype=np.float32),
            penalties=penalties if penalties != (1.0, 0.0, 0.0) else None,
        )
        return edits if edits._any else None

    @property
    def _any(self) -> bool:
        lists = len(self.banned) + len(self.ends) + len(self.biased)
        return bool(lists) or not (self.allowed is None and self.words is None and self.penalties is None)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """A row of logits whose sequence sits in `slot` and has `length` tokens, of which `num_prompt` are its prompt."""

    row: int
    slot: int
    num_prompt: int
    length: int
    edits: LogitsEdits


@dataclass(frozen=True, slots=True)
class BannedWords:
    """Words of several rows. compare: [4, tokens of all prefixes]: slot, position in it, the token that would make
    `word` its next one, word. target: [words], an index into the columns of `last` [2, n]: row and token."""

    compare: Tensor
    target: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of some rows. where: [5, rows] int64: row, slot, first position that counts, where the output begins, number of
    positions. amounts: [3, rows] float32: repetition, frequency, presence. total: of the numbers of positions."""

    where: Tensor
    amounts: Tensor
    total: int


@dataclass(frozen=True, slots=True)
class BatchEdits:
    """What is to be done to logits [rows, vocab]. Entries of them are [2, n] int64: row and token.

    allowed: rows [n] that may have nothing but the entries that follow. bias: entries, and what is added to them.
    """

    allowed: tuple[Tensor, Tensor] | None
    banned: Tensor | None
    words: BannedWords | None
    bias: tuple[Tensor, Tensor] | None
    penalties: list[Penalties]


# -- on the host ---------------------------------------------------------------------------------------------------


def ids(tokens: Iterable[int]) -> Array:
    return np.array(list(tokens), dtype=np.int64)


def entries(row: int, tokens: Array) -> Array:
    """[2, n]: row and token."""
    return np.stack([np.full_like(tokens, row), tokens])


def prepare(rows: Sequence[RowEdits], vocab_size: int, to_device: ToDevice) -> BatchEdits | None:
    """None where nothing is to be done in this step. to_device: brings an array to where the logits are."""
    allowed = [(row.row, row.edits.allowed) for row in rows if row.edits.allowed is not None]
    banned = [entries(row.row, row.edits.banned) for row in rows if len(row.edits.banned)]
    early = [row for row in rows if len(row.edits.ends) and row.length - row.num_prompt < row.edits.min_tokens]
    banned += [entries(row.row, row.edits.ends) for row in early]
    biased = [row for row in rows if len(row.edits.biased)]
    words, penalties = prepare_words(rows, to_device), prepare_penalties(rows, vocab_size, to_device)
    if not (allowed or banned or words or biased or penalties):
        return None

    def joined(arrays: list[NDArray[Any]]) -> Tensor:
        return to_device(np.concatenate(arrays, axis=-1))

    return BatchEdits(
        allowed=(
            (to_device(ids(row for row, _ in allowed)), joined([entries(row, tokens) for row, tokens in allowed]))
            if allowed
            else None
        ),
        banned=joined(banned) if banned else None,
        words=words,
        bias=(
            (joined([entries(row.row, row.edits.biased) for row in biased]), joined([row.edits.bias for row in biased]))
            if biased
            else None
        ),
        penalties=penalties,
    )


def prepare_words(rows: Sequence[RowEdits], to_device: ToDevice) -> BannedWords | None:
    """A prefix that is longer than the output is compared with NEVER: words do not begin in the prompt."""
    compare, target, last = [], [], []
    num_words = num_last = 0
    for row in rows:
        words = row.edits.words
        if words is not None:
            inside = words.back <= row.length - row.num_prompt
            slot = np.full_like(words.back, row.slot)
            position = np.where(inside, row.length - words.back, 0)
            compare.append(np.stack([slot, position, np.where(inside, words.token, NEVER), words.word + num_words]))
            target.append(words.target + num_last)
            last.append(entries(row.row, words.last))
            num_words, num_last = num_words + len(words.target), num_last + len(words.last)
    if not last:
        return None
    return BannedWords(
        to_device(np.concatenate(compare, axis=1)),
        to_device(np.concatenate(target)),
        to_device(np.concatenate(last, axis=1)),
    )


def prepare_penalties(rows: Sequence[RowEdits], vocab_size: int, to_device: ToDevice) -> list[Penalties]:
    """In arrays of so many rows as the counters are enough for."""
    where, amounts = [], []
    for row in rows:
        if row.edits.penalties is not None:
            first = 0 if row.edits.penalties[0] != 1.0 else row.num_prompt  # only repetition minds the prompt
            if first < row.length:
                where.append((row.row, row.slot, first, row.num_prompt, row.length - first))
                amounts.append(row.edits.penalties)
    size = max(1, COUNTERS // vocab_size)
    return [
        Penalties(
            to_device(np.array(where[i : i + size], dtype=np.int64).T),
            to_device(np.array(amounts[i : i + size], dtype=np.float32).T),
            sum(count for *_, count in where[i : i + size]),
        )
        for i in range(0, len(where), size)
    ]


# -- where the logits are ------------------------------------------------------------------------------------------


def apply(logits: Tensor, edits: BatchEdits, history: Tensor) -> None:
    """Change logits [rows, vocab] float32 in place. history: [slots, max_model_len] int32 token ids."""
    if edits.allowed is not None:
        rows, (row, token) = edits.allowed[0], edits.allowed[1].unbind()
        kept = logits[row, token]
        logits.index_fill_(0, rows, BANNED)
        logits[row, token] = kept
    if edits.banned is not None:
        # the number lies where the logits are: a plain one would be copied there, and the host wait for the copy
        logits.index_put_(edits.banned.unbind(), logits.new_full((), BANNED))
    if edits.words is not None:
        ban_words(logits, edits.words, history)
    if edits.bias is not None:
        (row, token), bias = edits.bias[0].unbind(), edits.bias[1]
        logits[row, token] += bias
    for penalties in edits.penalties:
        penalise(logits, penalties, history)


def ban_words(logits: Tensor, words: BannedWords, history: Tensor) -> None:
    """Ban the last token of every word whose others are the end of the output."""
    slot, position, token, word = words.compare.unbind()
    wrong = logits.new_zeros(len(words.target)).index_add_(0, word, (history[slot, position] != token).float())
    row, last = words.last.unbind()
    complete = logits.new_zeros(len(last)).index_add_(0, words.target, (wrong == 0).float())
    logits[row, last] = torch.where(complete > 0, BANNED, logits[row, last])


def penalise(logits: Tensor, penalties: Penalties, history: Tensor) -> None:
    """Repetition (CTRL, arXiv:1909.05858, section 4.1) over prompt and output; frequency and presence (OpenAI's) over
    the output only.

    Works on one value per position of the sequences. Where a token stands at several, all of them compute and write the
    same.
    """
    counts = penalties.where[4]
    sequence = torch.repeat_interleave(counts, output_size=penalties.total)
    row, slot, first, output = penalties.where[:4].index_select(1, sequence).unbind()
    repetition, frequency, presence = penalties.amounts.index_select(1, sequence).unbind()
    begin = (counts.cumsum(0) - counts)[sequence]
    position = torch.arange(penalties.total, device=logits.device) - begin + first
    token = history[slot, position].long()
    vocab_size = logits.shape[1]
    count = totals(sequence * vocab_size + token, (position >= output).float(), len(counts) * vocab_size)
    score = logits[row, token]
    score = torch.where(score > 0, score / repetition, score * repetition)
    logits[row, token] = score - torch.where(count > 0, frequency * count + presence, 0.0)


def totals(index: Tensor, values: Tensor, size: int) -> Tensor:
    """[n]: for each entry, the sum of the values of all entries with its index, which is below `size`."""
    sums = values.new_empty(size)  # only what is looked at is set to 0: the rest of it is far larger
    sums.index_fill_(0, index, 0.0)
    return sums.index_add_(0, index, values)[index]
