"""Defines the inputs of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that a step computes together: rows [first_row, first_row + count)."""

    seq: int
    first_row: int
    count: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class DeepStack:
    """Image features that are added to the hidden states after each of the first layers: arXiv:2406.04334."""

    rows: Tensor
    """[n] int64, rows of the tokens that stand for images."""
    levels: tuple[Tensor, ...]
    """[n, hidden] for each of the first layers."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The KV of a batch in one KV cache group. The fields of Batch with the same names explain them."""

    slot_mapping: Tensor
    block_table: Tensor
    kv_cache: Tensor
    kv_scales: Tensor | None = None


@dataclass(slots=True)
class Batch:
    """The tokens that a step computes, sequence after sequence.

    Rows and sequences at the end may be padding, so that CUDA graphs for a few sizes serve all batches
    (runner/graphs/cuda_graphs.py). Rows that belong to no sequence have slot_mapping -1, and sequences without rows
    have kv_len 0. No KV is written or read for padding. Its rows of an output are 0 or undefined (ops/attention.py).
    """

    positions: Tensor
    """[tokens] int64, position of each token in its sequence."""
    slot_mapping: Tensor
    """[tokens] int64, where each token's KV goes: block id * block_size + offset."""
    query_start: Tensor
    """[seqs + 1] int32, row where each sequence starts; the last entry is the number of tokens."""
    kv_len: Tensor
    """[seqs] int32, tokens of each sequence that have KV after this step."""
    block_table: Tensor
    """[seqs, max_blocks] int32, block ids in token order; entries past the sequence's end are arbitrary. In a group
    with a window, entries that no token of this step sees may be 0, a block of zeros."""
    kv_cache: Tensor
    """[num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim], the layers of the first KV cache group
    (kv_groups.py). A block is contiguous over all layers, so that handing it to another pool is one large copy, and a
    range of heads is contiguous too."""
    single: Tensor
    """[n] int32, sequences that compute one token, which attention treats separately; -1 is padding."""
    chunks: list[Chunk]
    """All other sequences, known on the host."""
    tiles: Tensor | None = None
    """On a CPU, how kernels divide `single` and `chunks`; the first layer computes it for all layers. On a GPU, the
    tiles of the chunks, which are an input of a CUDA graph. See `row_tiles`."""
    latent_tiles: Tensor | None = None
    """Like `tiles`, but for the CPU kernel of latent attention."""
    plans: dict[object, Any] = field(default_factory=dict)
    """What attention on a GPU derives from lengths once for all layers; see `plan` in ops/gpu/attention.py."""
    kv_scales: Tensor | None = None
    """[layers, 2 (K, V)] float32, for a cache in float8_e4m3fn: a value is the stored number times its scale. The
    tensor's address stays the same as long as the cache exists."""
    token_types: Tensor | None = None
    """[tokens] int64, 1 for tokens of the second text of a pair; None if there are no pairs."""
    deepstack: DeepStack | None = None
    span_ends: Tensor | None = None
    """[tokens] int32, the position before which a token's visible keys end. For a token of a span whose tokens see each
    other (ModelConfig.longest_span), this is the end of the span; for any other token, the position after its own. None
    if all tokens see only up to their own position."""
    rope_table: Tensor | None = None
    """[tokens, rotary_dim], used in place of the layers' tables when tokens of images have positions in height and
    width too; `positions` are then its rows."""
    states: Any = None
    """A StateBatch (state.py): the states of a model with recurrent layers; None for other models."""
    other_groups: tuple[KVGroup, ...] = ()
    """KV cache groups after the first."""
    views: dict[tuple[int, bool], Batch] = field(default_factory=dict)
    """Batches from `of_group`, made once for all layers."""

    @property
    def beyond_text(self) -> bool:
        """Whether tokens of this step need what steps of text do without."""
        return self.rope_table is not None or self.deepstack is not None or self.span_ends is not None

    def set_block_tables(self, tables: Sequence[Tensor]) -> None:
        """Replace the block tables. tables: one per KV cache group."""
        self.block_table, *others = tables
        self.other_groups = tuple(
            replace(kv, block_table=table) for kv, table in zip(self.other_groups, others, strict=True)
        )

    def of_group(self, group: int, causal: bool = False) -> Batch:
        """Return this batch with the KV of one KV cache group. causal: True if even the tokens of an image see only
        earlier tokens."""
        causal = causal and self.span_ends is not None
        if group == 0 and not causal:
            return self
        if (group, causal) not in self.views:
            kv = self.other_groups[group - 1] if group else self
            self.views[group, causal] = replace(
                self,
                slot_mapping=kv.slot_mapping,
                block_table=kv.block_table,
                kv_cache=kv.kv_cache,
                kv_scales=kv.kv_scales,
                span_ends=None if causal else self.span_ends,
                plans={},
                views={},
            )
        return self.views[group, causal]


def split(counts: ArrayLike, kv_lens: ArrayLike) -> tuple[Tensor, list[Chunk]]:
    """Return the fields `single`, on the host, and `chunks` of a Batch. counts: [seqs], tokens of each sequence in
    this step. kv_lens: [seqs], all tokens of each sequence, including this step's."""
    single, chunks = split_rows(counts, kv_lens)
    return torch.from_numpy(single), chunks_of(chunks)


def split_rows(
    counts: ArrayLike, kv_lens: ArrayLike, *, all_chunks: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return `single`, and the fields of each chunk, [n, 4]. all_chunks: sequences with one token also become
    chunks."""
    counts = np.asarray(counts)
    alone = (counts == 1) & (not all_chunks)
    if alone.all():
        return np.arange(len(counts), dtype=np.int32), np.empty((0, 4), dtype=np.int64)
    single, several = np.flatnonzero(alone).astype(np.int32), np.flatnonzero(~alone)
    columns = several, (counts.cumsum() - counts)[several], counts[several], np.asarray(kv_lens)[several]
    return single, np.stack(columns, axis=1)


def chunks_of(rows: NDArray[np.int64]) -> list[Chunk]:
    return [Chunk(*row) for row in rows.tolist()]


def row_tiles(chunks: ArrayLike, rows: int) -> NDArray[np.int32]:
    """Cut chunks into tiles of at most `rows` rows. Return [tiles, 4]: sequence, first row, number of rows, and number
    of the chunk's rows after them.

    chunks: [n, 4], from `split_rows`. The last rows of each chunk come first: they see the most keys, and a GPU starts
    tiles in order.
    """
    seq, first_row, count, _ = np.asarray(chunks, dtype=np.int32).reshape(-1, 4).T
    tiles = -(-count // rows)
    chunk = np.repeat(np.arange(len(seq)), tiles)
    row = (np.cumsum(tiles)[chunk] - np.arange(len(chunk), dtype=np.int32) - 1) * rows
    in_tile = np.minimum(rows, count[chunk] - row)
    return np.stack([seq[chunk], first_row[chunk] + row, in_tile, count[chunk] - row - in_tile], axis=1, dtype=np.int32)
