"""Computes where the tokens of a step are, as arrays on the host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from engine.wire.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a batch, as arrays [n] int64."""

    slots: np.ndarray
    counts: np.ndarray  #: tokens that this step computes
    ends: np.ndarray  #: length after this step, in tokens

    def divided(self, chosen: np.ndarray) -> tuple[Sequences, np.ndarray]:
        """Turn each token of the chosen sequences into a separate sequence of one token, which reads the tokens before
        it from shared KV.

        So tokens that verify drafts are computed by the kernels and graphs of decoding, and have the same bits as
        decoded tokens.
        chosen: [n] bool. Returns the new sequences, and for each old one the index of its first new one.
        """
        pieces = np.where(chosen, self.counts, 1)
        owner = np.repeat(np.arange(len(pieces)), pieces)
        after = np.cumsum(pieces)[owner] - np.arange(len(owner)) - 1  # how many pieces of its sequence follow each
        divided = Sequences(self.slots[owner], np.where(chosen, 1, self.counts)[owner], self.ends[owner] - after)
        return divided, np.cumsum(pieces) - pieces


@dataclass(frozen=True, slots=True)
class BatchRows:
    """How the rows of a batch are divided over sequences."""

    sequences: Sequences  #: those of the step, or more where tokens that verify drafts are sequences of their own
    query_start: np.ndarray  #: [sequences + 1], the first row of each, and the number of rows
    width: int  #: blocks of the longest sequence, with room for drafts


@dataclass(slots=True)
class StepLayout:
    """The tokens of a step, in the order of its plan's entries, as arrays of int64. Parts may change the last four
    fields."""

    sequences: Sequences  #: one per entry
    query_start: np.ndarray  #: [entries + 1], the first token of each entry, and the number of tokens
    entry: np.ndarray  #: [tokens], the entry of each token
    positions: np.ndarray  #: [tokens], positions in their sequences
    slot_mappings: list[np.ndarray]  #: [tokens] per group, where their KV goes: block * block_size + offset
    token_index: np.ndarray  #: [tokens], where they are in the flattened token history
    rotary: np.ndarray  #: [tokens], the positions by which a graph rotates them
    fits_graph: bool = True  #: whether a graph can compute the step
    divides_drafts: bool = True  #: whether tokens that verify drafts may be sequences of their own in a batch
    unsampled: Collection[int] = ()  #: slots of sequences for which no token is sampled

    @classmethod
    def of(cls, plan: StepPlan, block_tables: list[np.ndarray], block_size: int, max_model_len: int) -> StepLayout:
        """Lay out a plan. block_tables: [slots, blocks] int32 per KV cache group, with this plan's changes applied."""
        slots, starts, counts = (np.fromiter(c, np.int64, len(c)) for c in (plan.slots, plan.starts, plan.counts))
        query_start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start[1:])
        entry, positions, rows = query_start[:-1], starts, slots  # if each computes one token
        if query_start[-1] > len(slots):
            entry = np.repeat(np.arange(len(slots)), counts)
            positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[entry]
            rows = slots[entry]
        indices, offsets = np.divmod(positions, block_size)
        return cls(
            sequences=Sequences(slots, counts, starts + counts),
            query_start=query_start,
            entry=entry,
            positions=positions,
            slot_mappings=[table[rows, indices] * np.int64(block_size) + offsets for table in block_tables],
            token_index=rows * max_model_len + positions,
            rotary=positions,
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step samples."""

    entries: list[int]  #: the plan's entry of each token; one with drafts is repeated for each of its tokens
    slots: np.ndarray  #: [n] int64
    rows: np.ndarray  #: [n] int64, the rows of hidden states that they are sampled from
    positions: np.ndarray  #: [n] int64, positions in their sequences

    @classmethod
    def of(cls, plan: StepPlan, layout: StepLayout) -> SampledTokens:
        """Find the tokens that a plan samples."""
        index = np.flatnonzero(np.frombuffer(bytes(plan.samples), dtype=bool))  # a list takes seven times as long
        if layout.unsampled:
            index = np.array([i for i in index.tolist() if plan.slots[i] not in layout.unsampled], dtype=np.int64)
        entries: list[int] = index.tolist()
        back: np.ndarray | int = 0  # distance of each token to the last of its entry
        if plan.drafts:
            back = np.concatenate([np.arange(len(plan.drafts.get(i, ())), -1, -1) for i in entries])
            entries = [i for i in entries for _ in range(len(plan.drafts.get(i, ())) + 1)]
            index = np.array(entries, dtype=np.int64)
        sequences = layout.sequences
        rows = layout.query_start[1:][index] - 1 - back
        return cls(entries, sequences.slots[index], rows, sequences.ends[index] - back)
