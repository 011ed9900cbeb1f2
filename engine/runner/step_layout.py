"""Where the tokens of a step stand, as arrays on the host."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from engine.wire.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a batch: [n] int64 each."""

    slots: np.ndarray
    counts: np.ndarray  #: tokens that this step computes
    ends: np.ndarray  #: tokens of each after this step

    def divided(self, chosen: np.ndarray) -> tuple[Sequences, np.ndarray]:
        """Make each token of the chosen ones [n] bool a separate sequence, which sees those before it in the KV that
        they share. So tokens that verify drafts run by the kernels and graphs of decoding, and have their bits.

        Returns also, for each of these sequences, the first that it has become.
        """
        pieces = np.where(chosen, self.counts, 1)
        owner = np.repeat(np.arange(len(pieces)), pieces)
        after = np.cumsum(pieces)[owner] - np.arange(len(owner)) - 1  # pieces of the same sequence behind each
        divided = Sequences(self.slots[owner], np.where(chosen, 1, self.counts)[owner], self.ends[owner] - after)
        return divided, np.cumsum(pieces) - pieces


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The tokens of a step, entry by entry of its plan: int64 arrays."""

    sequences: Sequences  #: the entries
    query_start: np.ndarray  #: [entries + 1], the first token of each, and the number of all
    entry: np.ndarray  #: [tokens], the entry of each
    positions: np.ndarray  #: [tokens], in their sequences
    slot_mappings: list[np.ndarray]  #: [tokens] of each group, where their KV goes: block * block_size + offset
    token_index: np.ndarray  #: [tokens], where they are in the flattened token history

    @classmethod
    def of(cls, plan: StepPlan, block_tables: list[np.ndarray], block_size: int, max_model_len: int) -> StepLayout:
        """block_tables: [slots, blocks] int32 of each KV cache group, with the changes of this plan."""
        slots, starts, counts = (np.array(column, dtype=np.int64) for column in (plan.slots, plan.starts, plan.counts))
        query_start = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start[1:])
        entry = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[entry]
        rows, (indices, offsets) = slots[entry], np.divmod(positions, block_size)
        return cls(
            sequences=Sequences(slots, counts, starts + counts),
            query_start=query_start,
            entry=entry,
            positions=positions,
            slot_mappings=[table[rows, indices] * np.int64(block_size) + offsets for table in block_tables],
            token_index=rows * max_model_len + positions,
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step samples."""

    entries: list[int]  #: of the plan, of each token: several in a row where drafts are verified
    slots: np.ndarray  #: [n] int64
    rows: np.ndarray  #: [n] int64, of the hidden states that they are sampled from
    positions: np.ndarray  #: [n] int64, in their sequences

    @classmethod
    def of(cls, plan: StepPlan, layout: StepLayout, pooled: Container[int]) -> SampledTokens:
        """pooled: slots of sequences for which no token is sampled."""
        entries = [i for i in np.flatnonzero(plan.samples).tolist() if plan.slots[i] not in pooled]
        back: np.ndarray | int = 0  # tokens from each to the last of its entry
        if plan.drafts:
            back = np.concatenate([np.arange(len(plan.drafts.get(i, ())), -1, -1) for i in entries])
            entries = [i for i in entries for _ in range(len(plan.drafts.get(i, ())) + 1)]
        index, sequences = np.array(entries, dtype=np.int64), layout.sequences
        rows = layout.query_start[1:][index] - 1 - back
        return cls(entries, sequences.slots[index], rows, sequences.ends[index] - back)
