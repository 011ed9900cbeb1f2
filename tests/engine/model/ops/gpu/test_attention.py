"""The Triton attention against the plain one, over grids of shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.batch import Batch, Chunk, KVGroup, split_rows
from engine.model.ops import attention as plain_attention
from engine.model.ops.gpu import attention, rope
from engine.runner.graphs.cuda_graphs import StepColumns, StepShape, pad_step
from tests.engine.model.ops.gpu.paged import DEVICE, FLOAT8, LAYERS, Case

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

MIXED = Case([(37, 1), (0, 33), (5, 1), (50, 18)])
DECODE = Case([(300, 1), (0, 1), (15, 1), (16, 1), (63, 1), (64, 1)])
CHUNKS = Case([(0, 40), (70, 35), (15, 17), (16, 2)])

CASES = {
    "rows and chunks": MIXED,
    "rows that decode": DECODE,
    "chunks over cached prefixes": CHUNKS.but(head_dim=128, kv_heads=1),
    "seven query heads of a KV head": MIXED.but(heads=7, kv_heads=1),
    "head_dim 80, blocks of 20": MIXED.but(head_dim=80, block_size=20, kv_heads=1),
    "head_dim 256, blocks of 256": DECODE.but(head_dim=256, block_size=256, kv_heads=1),
    "blocks of one token": Case([(30, 1), (5, 1)], block_size=1, head_dim=16),
    "a window of one token": DECODE.but(window=1),
    "a window of 7": MIXED.but(window=7),
    "float32": MIXED.but(dtype=torch.float32),
    "float8 cache": MIXED.but(cache_dtype=FLOAT8),
    "padding among rows": Case([(20, 1), (0, 0), (40, 1), (0, 0)]),
    "keys in four splits": Case([(2100, 1), (900, 1), (0, 0), (30, 1)], heads=2, kv_heads=1),
    "keys of chunks in four splits": Case([(1300, 6), (30, 20)], heads=2, kv_heads=1),
    "capped scores": MIXED.but(softcap=1.5, dtype=torch.float32),
    "sinks": MIXED.but(sinks=True, dtype=torch.float32),
    "sinks of keys in four splits, and of padding": Case([(2100, 1), (0, 0)], heads=2, kv_heads=1, sinks=True),
    "chunks of 16 tokens": MIXED.but(chunk=16),
    "images": MIXED.but(images=True),
    "images longer than a window of 7": CHUNKS.but(images=True, window=7),
}
MORE_CASES = {
    "one head each": MIXED.but(heads=2),
    "more heads of a KV head than rows of a small tile": MIXED.but(heads=40, kv_heads=1, head_dim=16),
    "head_dim 8": MIXED.but(head_dim=8),
    "head_dim 96": MIXED.but(head_dim=96),
    "head_dim 256": MIXED.but(head_dim=256),
    "a window longer than a tile": DECODE.but(window=200),
    "a window longer than the sequences": CHUNKS.but(window=1000),
    "float32, a window": CHUNKS.but(dtype=torch.float32, window=33),
    "float16": MIXED.but(dtype=torch.float16),
    "float8 cache, float16": DECODE.but(cache_dtype=FLOAT8, dtype=torch.float16, head_dim=128),
    "padding only": Case([(0, 0), (0, 0)]),
    "keys in four splits, a window": Case([(2100, 1), (1300, 1)], kv_heads=1, window=1100),
    "a window of 33 and sinks": CHUNKS.but(window=33, sinks=True, heads=14),
    "chunks of 1024 tokens, keys in four splits": Case([(2100, 1), (1020, 9)], kv_heads=1, chunk=1024),
    "capped scores of a float8 cache, a window": MIXED.but(cache_dtype=FLOAT8, softcap=50.0, window=7),
    "images behind keys in four splits, longer than a window": Case(
        [(2100, 1), (1300, 90)], heads=2, kv_heads=1, window=30, images=True
    ),
    "float8 keys in four splits": Case([(2100, 1), (1300, 9)], kv_heads=1, cache_dtype=FLOAT8),
}


def check(case: Case, layer: int = 1) -> torch.Tensor:
    q, k, v, batch = case.inputs()
    scale = case.head_dim**-0.5
    plain_attention.write_kv(k, v, batch, layer)
    expected = plain_attention.paged_attention(q, batch, layer, scale, case.window, **case.scores())
    found = attention.paged_attention(q, batch, layer, scale, case.window, **case.scores())
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_paged_attention_equals_plain(case):
    assert check(case).isfinite().all(), "NaN lies wherever nothing was written"


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES.values(), ids=MORE_CASES)
def test_paged_attention_of_more_shapes_equals_plain(case):
    assert check(case).isfinite().all()


@settings(max_examples=6, derandomize=True)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 9])), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([8, 24, 64]),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.sampled_from([None, 1, 7, 33]),
)
def test_paged_attention_over_any_shape_equals_plain(sequences, heads, head_dim, block_size, window):
    check(Case(sequences, *heads, head_dim, block_size, window, dtype=torch.float32))


def test_every_layer_is_found():
    for layer in range(LAYERS):
        check(MIXED, layer)


def test_groups_of_layers_with_other_heads_have_tiles_of_their_own():
    """The first group's tiles have 32 rows; eight heads to a KV head leave four rows in as large a tile."""
    case = Case([(5, 40), (3, 1)], heads=2, kv_heads=2, head_dim=16)
    (q, k, v, batch), (other_q, other_k, other_v, other) = case.inputs(), case.but(heads=8, kv_heads=1).inputs()
    batch.other_groups = (KVGroup(other.slot_mapping, other.block_table, other.kv_cache),)
    for queries, keys, values, view in ((q, k, v, batch), (other_q, other_k, other_v, batch.of_group(1))):
        plain_attention.write_kv(keys, values, view, 0)
        expected = plain_attention.paged_attention(queries, view, 0, 0.25)
        found = attention.paged_attention(queries, view, 0, 0.25)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_padding_gives_zeros():
    out = check(CASES["padding among rows"])
    assert not out[[1, 3]].any()
    assert out[[0, 2]].all(dim=-1).any()


def test_a_batch_that_is_replayed_with_other_lengths_gives_their_results():
    """A captured graph reads lengths, tables and slots anew: nothing may have been kept from the batch before."""
    case = Case([(300, 1), (0, 0), (40, 1)])
    q, k, v, batch = case.inputs()
    plain_attention.write_kv(k, v, batch, 0)
    attention.paged_attention(q, batch, 0, 0.1)
    batch.plans.clear()  # each step makes one, on the device
    batch.kv_len.copy_(torch.tensor([2, 41, 0]))
    batch.block_table.copy_(batch.block_table[[2, 2, 0]])
    batch.kv_cache.nan_to_num_(0.5)
    expected = plain_attention.paged_attention(q, batch, 0, 0.1)
    torch.testing.assert_close(attention.paged_attention(q, batch, 0, 0.1), expected, atol=2e-2, rtol=2e-2)


DRAFTS = Case([(1300, 4), (40, 1), (300, 3), (7, 2)], kv_heads=1)


@pytest.mark.parametrize(
    ("case", "verified"),
    [
        *((CASES[name], 0) for name in ("rows and chunks", "keys of chunks in four splits", "rows that decode")),
        (DRAFTS, 4),
    ],
    ids=["rows and chunks", "keys of chunks in four splits", "rows that decode", "drafts"],
)
def test_a_step_that_is_padded_to_the_shape_of_a_graph_gives_what_it_gives_alone(case, verified):
    q, k, v, batch = case.inputs()
    plain_attention.write_kv(k, v, batch, 1)
    expected = plain_attention.paged_attention(q, batch, 1, 0.1)
    rows = attention.tile_rows(verified or 96, case.heads, case.kv_heads, case.head_dim, case.dtype, DEVICE)
    shape, columns = StepShape(96, 9, rows, verified=verified), [batch.positions, batch.positions, batch.slot_mapping]
    others = [torch.arange(len(batch.block_table)), batch.kv_len, batch.query_start]
    (*columns, mapping), others = ([column.cpu().numpy() for column in part] for part in (columns, others))
    split = split_rows(np.diff(others[2]), others[1], all_chunks=bool(verified))
    buffer = pad_step(shape, *columns, [mapping], *others, *split)
    padded = StepColumns.of(torch.from_numpy(buffer).to(DEVICE), shape, torch.int64)
    table = torch.cat(
        [batch.block_table, batch.block_table.new_zeros(9 - len(batch.kv_len), batch.block_table.shape[1])]
    )
    given = Batch(
        positions=padded.positions, slot_mapping=padded.slot_mappings[0], query_start=padded.query_start,
        kv_len=padded.kv_len, block_table=table, kv_cache=batch.kv_cache,
        single=padded.single[: 0 if verified else 9], chunks=[Chunk(0, 0, shape.longest, 0)],
        tiles=padded.tiles.view(-1, 4),
    )  # fmt: skip
    padding = q.new_full((96 - len(q), *q.shape[1:]), torch.nan)
    found = attention.paged_attention(torch.cat([q, padding]), given, 1, 0.1)
    torch.testing.assert_close(found[: len(q)], expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


def test_offsets_in_a_cache_of_more_than_two_to_the_31_values_do_not_overflow():
    """The last block of 2.2e9 values; on a CPU only the pages that are written take memory."""
    case = Case([(3, 1)], heads=1, kv_heads=1, head_dim=64, block_size=64)
    q, k, v, batch = case.inputs()
    last = 2_200_000_000 // (LAYERS * 2 * 64 * 64)
    small = batch.kv_cache
    batch.kv_cache = torch.empty((last + 1, *small.shape[1:]), dtype=small.dtype, device=DEVICE)
    batch.kv_cache[last] = small[batch.block_table[0, 0]]
    batch.slot_mapping += (last - batch.block_table[0, 0].item()) * 64
    batch.block_table.fill_(last)
    straight = torch.tensor([1.0, 0.0]).repeat_interleave(32).expand(64, 64).to(DEVICE, k.dtype)
    rope.rotate_and_write(q, k, v, straight, batch, 1)
    torch.testing.assert_close(batch.kv_cache[last, 1, 0, :, 3], k[0])
    expected = plain_attention.paged_attention(q, batch, 1, 0.1)
    torch.testing.assert_close(attention.paged_attention(q, batch, 1, 0.1), expected, atol=2e-2, rtol=2e-2)


def planned(kv_lens: list[int], wanted: int, **options: int) -> list[list[int]]:
    batch = Case([(1, 1)] * len(kv_lens)).inputs()[3]
    batch.kv_len.copy_(torch.tensor(kv_lens))
    spans = {"window": 0, "chunk": 0} | options
    items = attention.plan(batch, batch.single, wanted, **spans, block_n=32, decode=True).tolist()
    assert len(items) == len(kv_lens) + wanted
    return [item for item in items if item[0] >= 0]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kv_lens=st.lists(st.sampled_from([0, 1, 31, 256, 257, 900, 5000]), min_size=1, max_size=9),
    wanted=st.integers(1, 40),
    window=st.sampled_from([0, 1, 700]),
)
def test_every_key_is_planned_once_and_every_split_tile_has_its_own_slots(kv_lens, wanted, window):
    items, slots = planned(kv_lens, wanted, window=window), []
    for seq, kv_len in enumerate(kv_lens):
        mine = [item for item in items if item[0] == seq]
        start = max(kv_len - window, 0) if window else 0
        assert [item[4] for item in mine] == [start, *(item[5] for item in mine[:-1])]
        assert mine[-1][5] == kv_len
        assert [(item[7], item[8]) for item in mine] == [(len(mine), i) for i in range(len(mine))]
        slots += [item[6] + item[8] for item in mine if item[7] > 1]
    assert slots == list(range(len(slots)))
    assert len(slots) <= 2 * wanted


def test_a_long_sequence_among_short_ones_is_split_by_its_length():
    items = planned([100_000] + [1000] * 63, 66)
    assert max(item[5] - item[4] for item in items) <= -(-163_000 // 66 // 32) * 32 + 32
    assert sum(item[0] == 0 for item in items) == 41
    assert len(items) == 41 + 63


def test_programs_in_any_order_give_the_same_bits_and_leave_their_counters_at_zero():
    case = CASES["keys in four splits"]
    q, k, v, batch = case.inputs()
    plain_attention.write_kv(k, v, batch, 0)
    found = [attention.paged_attention(q, batch, 0, 0.1) for _ in range(2)]
    assert torch.equal(*found)
    assert not attention.counters(q.device).any()
    assert max(item[7] for item in batch.plans[True, 0, 0].tolist()) >= 4
