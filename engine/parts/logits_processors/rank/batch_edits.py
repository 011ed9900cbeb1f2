"""Changes to logits before sampling, in vLLM's order: bans, minimum length, bias, penalties.

All rows of a step are changed together, by operations whose sizes the host knows. So nothing here waits for the newest
tokens, which are only on the device. Only the entries of [rows, vocab] that change are read and written. So the cost of
a row grows with its own tokens and the tokens that its request names, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.ops.logits.penalties import Penalise, Penalties
from engine.parts.logits_processors.rank.logits_edits import Array, LogitsEdits, ids
from engine.runner.sampler import ToDevice

BANNED = float("-inf")
# Token counters in use at a time, in float32: 16 MiB. Above 32 MiB, a CPU's allocator asks the system for memory at
# every step, which takes longer than counting.
COUNTERS = 2**22
NEVER = -1  # no token


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The edits of one row of logits."""

    row: int
    slot: int
    length: int  #: tokens of prompt and output
    edits: LogitsEdits

    @property
    def num_output(self) -> int:
        return self.length - self.edits.num_prompt


@dataclass(frozen=True, slots=True)
class BannedWords:
    """Banned words of several rows."""

    compare: Tensor  #: [4, tokens of all prefixes] int64: slot, position, the token that the word has there, the word
    target: Tensor  #: [words], an index into the columns of `last`
    last: Tensor  #: [2, n] int64: row of logits, and the last token of a word


@dataclass(slots=True)
class BatchEdits:
    """The changes of one step to logits [rows, vocab]. Entries are [2, n] int64: row and token."""

    allowed: tuple[Tensor, Tensor] | None  #: rows [n], and the only entries of these rows that are not banned
    banned: Tensor | None  #: entries
    words: BannedWords | None
    bias: tuple[Tensor, Tensor] | None  #: entries, and the numbers added to them
    penalties: list[Penalties]


# -- on the host ---------------------------------------------------------------------------------------------------


def entries(row: int, tokens: Array) -> Array:
    """Return the entries of `tokens` in one row of the logits: [2, n], row and token."""
    return np.stack([np.full_like(tokens, row), tokens])


def prepare(
    rows: Sequence[RowEdits], vocab_size: int, to_device: ToDevice, counters: int = COUNTERS
) -> BatchEdits | None:
    """Return the changes of one step, or None if there are none. to_device: copies an array to the logits' device.
    counters: most token counters in use at a time."""
    allowed = [(row.row, row.edits.allowed) for row in rows if row.edits.allowed is not None]
    banned = [entries(row.row, row.edits.banned) for row in rows if len(row.edits.banned)]
    early = [row for row in rows if len(row.edits.ends) and row.num_output < row.edits.min_tokens]
    banned += [entries(row.row, row.edits.ends) for row in early]
    biased = [row for row in rows if len(row.edits.biased)]
    words, penalties = prepare_words(rows, to_device), prepare_penalties(rows, vocab_size, to_device, counters)
    if not (allowed or banned or words or biased or penalties):
        return None

    edits = BatchEdits(None, None, words, None, penalties)
    if allowed:
        kept = [entries(row, tokens) for row, tokens in allowed]
        edits.allowed = to_device(ids(row for row, _ in allowed)), to_device(np.concatenate(kept, axis=1))
    if banned:
        edits.banned = to_device(np.concatenate(banned, axis=1))
    if biased:
        targets = np.concatenate([entries(row.row, row.edits.biased) for row in biased], axis=1)
        edits.bias = to_device(targets), to_device(np.concatenate([row.edits.bias for row in biased]))
    return edits


def prepare_words(rows: Sequence[RowEdits], to_device: ToDevice) -> BannedWords | None:
    """Prepare the banned words of all rows. A word must lie in the output as a whole: a prefix longer than the output
    is compared with NEVER and cannot match."""
    compare, target, last = [], [], []
    num_words = num_last = 0
    for row in rows:
        words = row.edits.words
        if words is not None:
            inside = words.back <= row.num_output
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


def prepare_penalties(rows: Sequence[RowEdits], vocab_size: int, to_device: ToDevice, counters: int) -> list[Penalties]:
    """Prepare the penalties, in groups of as many rows as `counters` allows."""
    where, amounts = [], []
    for row in rows:
        if row.edits.penalties is not None:
            first = 0 if row.edits.penalties[0] != 1.0 else row.edits.num_prompt  # only repetition counts the prompt
            if first < row.length:
                where.append((row.row, row.slot, first, row.edits.num_prompt, row.length - first))
                amounts.append(row.edits.penalties)
    size = max(1, counters // vocab_size)
    return [
        Penalties(
            to_device(np.array(where[i : i + size], dtype=np.int64).T),
            to_device(np.array(amounts[i : i + size], dtype=np.float32).T),
            sum(count for *_, count in where[i : i + size]),
        )
        for i in range(0, len(where), size)
    ]


# -- on the device of the logits -----------------------------------------------------------------------------------


def apply(logits: Tensor, edits: BatchEdits, history: Tensor, penalise: Penalise) -> None:
    """Change logits [rows, vocab] float32 in place. history: [slots, max_model_len] int32 token ids."""
    if edits.allowed is not None:
        rows, (row, token) = edits.allowed[0], edits.allowed[1].unbind()
        kept = logits[row, token]
        logits.index_fill_(0, rows, BANNED)
        logits[row, token] = kept
    if edits.banned is not None:
        # a tensor, since a plain number would be copied to the device, and the host would wait for the copy
        logits.index_put_(edits.banned.unbind(), logits.new_full((), BANNED))
    if edits.words is not None:
        ban_words(logits, edits.words, history)
    if edits.bias is not None:
        (row, token), bias = edits.bias[0].unbind(), edits.bias[1]
        logits[row, token] += bias
    for penalties in edits.penalties:
        penalise(logits, penalties, history)


def ban_words(logits: Tensor, words: BannedWords, history: Tensor) -> None:
    """Ban the last token of every word whose other tokens are the newest of the output."""
    slot, position, token, word = words.compare.unbind()
    wrong = logits.new_zeros(len(words.target)).index_add_(0, word, (history[slot, position] != token).float())
    row, last = words.last.unbind()
    complete = logits.new_zeros(len(last)).index_add_(0, words.target, (wrong == 0).float())
    logits[row, last] = torch.where(complete > 0, BANNED, logits[row, last])
