"""Changes to logits before sampling, in vLLM's order: bans, minimum length, bias, penalties, end of reasoning.

All rows of a step are changed together, by operations whose sizes the host knows. So nothing here waits for the newest
tokens, which are only on the device. Only the entries of [rows, vocab] that change are read and written. So the cost of
a row grows with its own tokens and the tokens that its request names, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.ops.logits.penalties import Penalise, Penalties
from engine.wire.sampling_params import SamplingParams, ThinkingBudget

BANNED = float("-inf")
# Token counters in use at a time, in float32: 16 MiB. Above 32 MiB, a CPU's allocator asks the system for memory at
# every step, which takes longer than counting.
COUNTERS = 2**22
NEVER = -1  # no token
NO_PENALTIES = (1.0, 0.0, 0.0)
# Number of positions at which the end of reasoning is tried. A grammar does not allow it inside a character, which has
# up to 4 bytes and so up to 4 tokens.
MAX_CHARACTER = 4

Array = NDArray[np.int64]
ToDevice = Callable[[NDArray[Any]], Tensor]


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

    allowed: Array | None  #: the only tokens that are not banned
    banned: Array
    words: Words | None
    ends: Array  #: tokens that are banned until the output has `min_tokens` tokens
    min_tokens: int
    biased: Array  #: [n], tokens to which `bias` is added
    bias: NDArray[np.float32]  #: [n]
    penalties: tuple[float, float, float] | None  #: repetition, frequency, presence
    thinking: ThinkingBudget | None

    @classmethod
    def of(cls, params: SamplingParams, eos: frozenset[int]) -> LogitsEdits | None:
        """Return the changes, or None if there are none. eos: tokens that end a generation."""
        words = [word for word in params.bad_words_token_ids if word]
        longer = [word for word in words if len(word) > 1]
        bias = params.logit_bias or {}
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        ends = sorted(eos | set(params.stop_token_ids)) if params.min_tokens else []
        thinking = params.thinking_budget
        if not (words or bias or ends or params.allowed_token_ids or penalties != NO_PENALTIES or thinking):
            return None
        return cls(
            allowed=ids(params.allowed_token_ids) if params.allowed_token_ids else None,
            banned=ids(word[0] for word in words if len(word) == 1),
            words=Words.of(longer) if longer else None,
            ends=ids(ends),
            min_tokens=params.min_tokens,
            biased=ids(bias),
            bias=np.array(list(bias.values()), dtype=np.float32),
            penalties=penalties if penalties != NO_PENALTIES else None,
            thinking=thinking,
        )


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The edits of one row of logits."""

    row: int
    slot: int
    num_prompt: int
    length: int  #: tokens of prompt and output
    edits: LogitsEdits


@dataclass(frozen=True, slots=True)
class BannedWords:
    """Banned words of several rows."""

    compare: Tensor  #: [4, tokens of all prefixes] int64: slot, position, the token that the word has there, the word
    target: Tensor  #: [words], an index into the columns of `last`
    last: Tensor  #: [2, n] int64: row of logits, and the last token of a word


@dataclass(frozen=True, slots=True)
class ThinkingEnds:
    """Rows whose reasoning must end now, unless it has ended already."""

    where: Tensor  #: [7, rows] int64: row, slot, start of the output, length, tokens that begin and end it, and a call
    total: int  #: tokens of all outputs


@dataclass(slots=True)
class BatchEdits:
    """The changes of one step to logits [rows, vocab]. Entries are [2, n] int64: row and token."""

    allowed: tuple[Tensor, Tensor] | None  #: rows [n], and the only entries of these rows that are not banned
    banned: Tensor | None  #: entries
    words: BannedWords | None
    bias: tuple[Tensor, Tensor] | None  #: entries, and the numbers added to them
    penalties: list[Penalties]
    thinking: ThinkingEnds | None


# -- on the host ---------------------------------------------------------------------------------------------------


def ids(tokens: Iterable[int]) -> Array:
    return np.array(list(tokens), dtype=np.int64)


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
    early = [row for row in rows if len(row.edits.ends) and row.length - row.num_prompt < row.edits.min_tokens]
    banned += [entries(row.row, row.edits.ends) for row in early]
    biased = [row for row in rows if len(row.edits.biased)]
    words, penalties = prepare_words(rows, to_device), prepare_penalties(rows, vocab_size, to_device, counters)
    thinking = prepare_thinking(rows, to_device)
    if not (allowed or banned or words or biased or penalties or thinking):
        return None

    edits = BatchEdits(None, None, words, None, penalties, thinking)
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


def prepare_penalties(rows: Sequence[RowEdits], vocab_size: int, to_device: ToDevice, counters: int) -> list[Penalties]:
    """Prepare the penalties, in groups of as many rows as `counters` allows."""
    where, amounts = [], []
    for row in rows:
        if row.edits.penalties is not None:
            first = 0 if row.edits.penalties[0] != 1.0 else row.num_prompt  # only repetition counts the prompt
            if first < row.length:
                where.append((row.row, row.slot, first, row.num_prompt, row.length - first))
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


def prepare_thinking(rows: Sequence[RowEdits], to_device: ToDevice) -> ThinkingEnds | None:
    where = []
    for row in rows:
        budget, length = row.edits.thinking, row.length - row.num_prompt
        if budget is not None and 0 <= length - budget.ends_at < MAX_CHARACTER:
            opening, call = (NEVER if token is None else token for token in (budget.open, budget.call))
            where.append((row.row, row.slot, row.num_prompt, length, opening, budget.close, call))
    if not where:
        return None
    return ThinkingEnds(to_device(np.array(where, dtype=np.int64).T), sum(length for _, _, _, length, *_ in where))


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
    if edits.thinking is not None:
        end_thinking(logits, edits.thinking, history)


def ban_words(logits: Tensor, words: BannedWords, history: Tensor) -> None:
    """Ban the last token of every word whose other tokens are the newest of the output."""
    slot, position, token, word = words.compare.unbind()
    wrong = logits.new_zeros(len(words.target)).index_add_(0, word, (history[slot, position] != token).float())
    row, last = words.last.unbind()
    complete = logits.new_zeros(len(last)).index_add_(0, words.target, (wrong == 0).float())
    logits[row, last] = torch.where(complete > 0, BANNED, logits[row, last])


def end_thinking(logits: Tensor, ends: ThinkingEnds, history: Tensor) -> None:
    """Ban all tokens but the closing tag in rows whose reasoning has begun and not ended. A row in which the closing
    tag is banned stays as it is."""
    row, slot, start, length, opening, closing, call = ends.where.unbind()
    sequence = torch.repeat_interleave(length, output_size=ends.total)
    position = torch.arange(ends.total, device=logits.device) + (start - length.cumsum(0) + length)[sequence]
    token = history[slot[sequence], position]
    is_end = (token == closing[sequence]) | (token == call[sequence])
    num_closed = logits.new_zeros(len(row)).index_add_(0, sequence, is_end.float())
    tag = logits[row, closing]
    open_now = ((opening == NEVER) | (history[slot, start] == opening)) & (num_closed == 0) & tag.isfinite()
    logits[row] = torch.where(open_now.unsqueeze(1), BANNED, logits[row])
    logits[row, closing] = tag
