"""Whole models on the strict kernels: a token has the same logits alone, in any batch and chunk, on any number of
ranks."""

from __future__ import annotations

from threading import Lock

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from engine.distributed.tp_group import TPGroup
from engine.model import fixed_order
from engine.model.fixed_order import FixedOrder
from engine.model.ops import dispatch, linear
from engine.model.ops.gpu.strict import attention
from engine.model.ops.gpu.strict import linear as strict_linear
from tests.batches import ByHand, load_by_hand
from tests.models import make_model
from tests.ranks import make_ranks, on_all

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="is about the interpreter"),
]

PROMPT, OUTPUT = [5 + 11 * i * i % 80 for i in range(20)], [7]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2")  # a window, biases, norms of heads, capped scores


@pytest.fixture(autouse=True)
def on_strict_kernels(monkeypatch):
    """Choose kernels as on a GPU, with small tiles, and launch one at a time, whichever rank does."""
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda dtype, device: False)
    monkeypatch.setattr(dispatch, "gpu_kernels", lambda dtype, device: True)
    monkeypatch.setattr(linear, "cpu_kernels", lambda: None)
    monkeypatch.setattr(linear, "pack", lambda weight: weight)
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 64), ("BLOCK_K", 32)):
        monkeypatch.setattr(strict_linear, name, size)
    monkeypatch.setattr(attention, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(attention, "BLOCK_M", 32)
    monkeypatch.setattr(attention.attention, "CHUNK_ROWS", 32)
    monkeypatch.setattr(attention.attention, "KEY_TILE_BYTES", 512)
    lock, run = Lock(), GridExecutor.__call__

    def launch(grid, *args, **options):
        with lock:
            run(grid, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)


def load(folder, tp: TPGroup) -> ByHand:
    run = load_by_hand(folder, FixedOrder(tp), torch.bfloat16)
    fixed_order.use_gpu_kernels(run.model)
    return run


def logits(run: ByHand, chunk: int, others: int) -> Tensor:
    """Logits of a prompt in chunks and of tokens after it, one by one, among other sequences."""
    found = []
    for step, first in enumerate(range(0, len(PROMPT), chunk)):
        ids = {i: [3 + i, 4] if step % 2 else [5] for i in range(1, 1 + others)}
        rows = PROMPT[first : first + chunk]
        found.append(run.step({**ids, 0: rows})[-len(rows) :])
    for token in OUTPUT:
        found.append(run.step({0: [token], **{i: [6] for i in range(1, 1 + others)}})[:1])
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_the_same_logits_in_any_batch_and_chunk_and_on_any_number_of_ranks(family, tmp_path):
    make_model(tmp_path, family, vocab_size=96, num_hidden_layers=1)
    expected = logits(load(tmp_path, TPGroup.single()), chunk=len(PROMPT), others=0)
    assert expected.isfinite().all()
    plain = load_by_hand(tmp_path).step({0: PROMPT + OUTPUT})
    assert torch.nn.functional.cosine_similarity(expected, plain, dim=-1).min() > 0.99
    for chunk, others in ((9, 2),):
        assert torch.equal(logits(load(tmp_path, TPGroup.single()), chunk, others), expected), (chunk, others)
    for size in (2,) if family == "qwen3" else (2, 4):
        ranks = [load(tmp_path, tp) for tp in make_ranks(size)]
        groups = [rank.model.embed_tokens.tp for rank in ranks]
        for found in on_all(groups, lambda rank: logits(ranks[rank], 11, 1)):  # noqa: B023
            assert torch.equal(found, expected), size
