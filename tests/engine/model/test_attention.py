"""The plain ops against a naive dense attention, row by row in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model.batch import Batch, split
from engine.model.ops.attention import paged_attention, write_kv

LAYERS, HEAD_DIM = 2, 8


class Sequence:
    """`cached` tokens computed earlier, then `queries` tokens in this step."""

    def __init__(self, cached: int, queries: int, heads: int, kv_heads: int):
        self.cached, self.queries = cached, queries
        self.length = cached + queries
        self.q = torch.randn(queries, heads, HEAD_DIM)
        self.k = torch.randn(self.length, kv_heads, HEAD_DIM)
        self.v = torch.randn(self.length, kv_heads, HEAD_DIM)

    def expected(
        self, scale: float, window: int | None, softcap: float | None = None, sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(self.q)
        group = self.q.shape[1] // self.k.shape[1]
        for row in range(self.queries):
            position = self.cached + row
            first = 0 if window is None else max(0, position - window + 1)
            first = first if chunk is None else max(first, position // chunk * chunk)
            for head in range(self.q.shape[1]):
                keys = self.k[first : position + 1, head // group].double()
                values = self.v[first : position + 1, head // group].double()
                scores = keys @ self.q[row, head].double() * scale
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                weights = scores.exp()
                total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
                out[row, head] = (weights / total @ values).float()
        return out


def make_batch(sequences: list[Sequence], block_size: int, kv_heads: int, new: bool) -> Batch:
    """Blocks in random order in a cache of NaN. `new`: the tokens of this step, otherwise those cached before."""
    needed = [-(-s.length // block_size) for s in sequences]
    ids = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(0)).int()
    table = torch.full((len(sequences), max(needed)), -1, dtype=torch.int32)
    for i, blocks in enumerate(ids.split([*needed, 3])[:-1]):
        table[i, : len(blocks)] = blocks
    spans = [range(s.cached, s.length) if new else range(s.cached) for s in sequences]
    slots = [int(table[i, p // block_size]) * block_size + p % block_size for i, span in enumerate(spans) for p in span]
    counts = [len(span) for span in spans]
    single, chunks = split(counts, [span.stop for span in spans])
    return Batch(
        positions=torch.tensor([p for span in spans for p in span]),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        kv_len=torch.tensor([span.stop for span in spans], dtype=torch.int32),
        block_table=table,
        kv_cache=torch.full((len(ids), LAYERS, 2, kv_heads, block_size, HEAD_DIM), torch.nan),
        single=single,
        chunks=chunks,
    )


def attend(sequences: list[Sequence], block_size: int, window: int | None, layer: int = 1, **scores: Any) -> Tensor:
    """Write what was cached in one step, then this step's tokens, then attend."""
    kv_heads = sequences[0].k.shape[1]
    before, batch = (make_batch(sequences, block_size, kv_heads, new) for new in (False, True))
    batch.kv_cache = before.kv_cache
    write_kv(
        torch.cat([s.k[: s.cached] for s in sequences]), torch.cat([s.v[: s.cached] for s in sequences]), before, layer
    )
    write_kv(
        torch.cat([s.k[s.cached :] for s in sequences]), torch.cat([s.v[s.cached :] for s in sequences]), batch, layer
    )
    assert batch.kv_cache[:, 1 - layer].isnan().all(), "the other layer is left alone"
    return paged_attention(torch.cat([s.q for s in sequences]), batch, layer, HEAD_DIM**-0.5, window, **scores)


@settings(max_examples=60, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 5, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 4, 7, 100]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    chunk=st.sampled_from([None, None, 1, 8]),
)
def test_paged_attention_equals_dense_attention(lengths, block_size, heads, window, softcap, sinks, chunk):
    torch.manual_seed(0)
    sequences = [Sequence(cached, queries, *heads) for cached, queries in lengths]
    scores = {"softcap": softcap, "sinks": torch.randn(heads[0]) if sinks else None, "chunk": chunk}
    expected = torch.cat([s.expected(HEAD_DIM**-0.5, window, **scores) for s in sequences])
    torch.testing.assert_close(attend(sequences, block_size, window, **scores), expected, atol=1e-5, rtol=1e-5)


def test_a_chunk_that_ends_on_a_block_boundary_reads_no_further_block():
    sequences = [Sequence(cached, queries, 4, 2) for cached, queries in ((0, 4), (4, 4), (3, 1), (8, 1), (7, 5))]
    expected = torch.cat([s.expected(HEAD_DIM**-0.5, None) for s in sequences])
    torch.testing.assert_close(attend(sequences, 4, None), expected, atol=1e-5, rtol=1e-5)


def test_a_prompt_in_chunks_gives_the_rows_of_the_whole_prompt():
    torch.manual_seed(0)
    whole = Sequence(0, 13, 4, 2)
    rows = attend([whole], 4, None)
    for start, stop in ((0, 5), (5, 6), (6, 13)):
        part = Sequence(start, stop - start, 4, 2)
        part.q, part.k, part.v = whole.q[start:stop], whole.k[:stop], whole.v[:stop]
        torch.testing.assert_close(attend([part], 4, None), rows[start:stop], atol=1e-6, rtol=1e-6)


def test_scores_are_scaled_before_the_softmax():
    sequence = Sequence(3, 1, 1, 1)
    batch = make_batch([sequence], 4, 1, new=True)
    batch.kv_cache.zero_()
    batch.kv_cache[batch.block_table[0, 0], 0, 0, 0, :, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    batch.kv_cache[batch.block_table[0, 0], 0, 1, 0, 1, 0] = 1.0
    q = torch.zeros(1, 1, HEAD_DIM)
    q[0, 0, 0] = 1.0
    out = paged_attention(q, batch, 0, scale=2.0)
    assert math.isclose(out[0, 0, 0].item(), math.exp(2) / (math.exp(2) + 3), rel_tol=1e-6)
