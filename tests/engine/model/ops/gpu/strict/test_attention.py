"""A row has the same bits of attention alone, among others, in chunks, and however many programs share its keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.batch import Batch, split
from engine.model.ops import attention_plain
from engine.model.ops.gpu.strict import attention
from tests.engine.model.ops.gpu.paged import DEVICE

pytestmark = pytest.mark.kernels

LENGTH, BLOCK, HEADS = 130, 16, 4
POSITIONS = (0, 31, 32, 63, 64, 100, 129)  # at the borders of tiles and splits, and between them


class Sequence:
    """A sequence of LENGTH tokens, of which any spans are computed in one step, each as if it were a sequence."""

    def __init__(self, kv_heads: int, head_dim: int, window: int | None, softcap: float | None):
        self.window, self.softcap = window, softcap
        generator = torch.Generator().manual_seed(0)
        self.blocks = -(-LENGTH // BLOCK)
        shape = self.blocks, 1, 2, kv_heads, BLOCK, head_dim
        self.cache = torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)
        self.q = torch.randn(LENGTH, HEADS, head_dim, generator=generator).to(DEVICE, torch.bfloat16)
        self.table = torch.randperm(self.blocks, generator=generator).int()

    def batch(self, spans: list[tuple[int, int]]) -> tuple[Tensor, Batch]:
        """The queries of positions [first, end) of each span, and their step."""
        counts, kv_lens = [end - first for first, end in spans], [end for _, end in spans]
        single, chunks = split(counts, kv_lens)
        return torch.cat([self.q[first:end] for first, end in spans]), Batch(
            positions=torch.empty(0), slot_mapping=torch.empty(0),
            query_start=torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
            kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
            block_table=self.table.repeat(len(spans), 1).to(DEVICE), kv_cache=self.cache,
            single=single.to(DEVICE), chunks=chunks,
        )  # fmt: skip

    def attend(self, spans: list[tuple[int, int]]) -> dict[int, Tensor]:
        """Return the result of each position."""
        q, batch = self.batch(spans)
        out = attention.paged_attention(q, batch, 0, 0.1, self.window, softcap=self.softcap)
        return dict(zip((p for span in spans for p in range(*span)), out, strict=True))


def programs(batch: Batch) -> int:
    """The most programs of a tile in the only plan of a step."""
    (items,) = (plan for key, plan in batch.plans.items() if key[0] == "strict")
    return int(items[items[:, 0] >= 0, 7].max())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(attention, "BLOCK_M", 32)
    monkeypatch.setattr(attention.attention, "CHUNK_ROWS", 32)
    monkeypatch.setattr(attention.attention, "KEY_TILE_BYTES", 4096)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "window", "softcap"),
    [
        (1, 64, None, None),
        pytest.param(1, 64, 20, None, marks=pytest.mark.slow),
        pytest.param(2, 40, 50, 2.0, marks=pytest.mark.slow),
    ],
    ids=["all keys", "a window", "a window longer than a split, capped scores"],
)
def test_a_row_has_the_same_bits_alone_in_any_batch_and_in_any_chunk(kv_heads, head_dim, window, softcap):
    sequence = Sequence(kv_heads, head_dim, window, softcap)
    alone = {position: sequence.attend([(position, position + 1)])[position] for position in POSITIONS}
    q, batch = sequence.batch([(p, p + 1) for p in POSITIONS])
    plain = attention_plain.paged_attention(q, batch, 0, 0.1, window, softcap=softcap)
    torch.testing.assert_close(torch.stack(list(alone.values())), plain, atol=2e-2, rtol=2e-2)
    batches = [
        [(p, p + 1) for p in POSITIONS[:2]],
        [(p, p + 1) for p in (*POSITIONS, *range(102, 128))],  # 33 rows, too many for partial results of all splits
        [(50, 110), (126, 130)],  # a chunk and some drafts
        [(0, 33), (129, 130), (62, 66)],
    ]
    for spans in batches:
        found = sequence.attend(spans)
        for position in found.keys() & alone.keys():
            assert torch.equal(found[position], alone[position]), (spans, position)


def test_keys_are_shared_by_programs_where_partial_results_have_room_and_by_none_where_they_do_not(monkeypatch):
    sequence = Sequence(2, 64, None, None)
    results = []
    for room in (attention.PARTIAL_BYTES, 1):
        monkeypatch.setattr(attention, "PARTIAL_BYTES", room)
        for spans in ([(128, 129)], [(110, 130)]):
            q, batch = sequence.batch(spans)
            results.append(attention.paged_attention(q, batch, 0, 0.1)[18 * (len(q) > 1)])
            assert programs(batch) == (5 if room > 1 else 1)
    assert all(torch.equal(result, results[0]) for result in results)


def test_padding_gives_zeros_and_reads_no_key():
    sequence = Sequence(2, 64, None, None)
    q, batch = sequence.batch([(128, 129), (0, 1)])
    expected = attention.paged_attention(q, batch, 0, 0.1)[0]
    batch.plans.clear()
    batch.kv_len[1] = 0
    found = attention.paged_attention(q, batch, 0, 0.1)
    assert torch.equal(found[0], expected)
    assert not found[1].any()
