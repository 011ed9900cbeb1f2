from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model.fixed_order import in_fixed_order
from engine.model.layers.embedding import LMHead, TiedLMHead, VocabEmbedding
from engine.model.models.registry import build
from engine.model.shard import ShardPlan
from tests.cpu_kernels import needs_linear_kernel
from tests.engine.model.layers.sharding import random_tensors, run_sharded

HIDDEN = 6


@pytest.mark.parametrize(("vocab", "size"), [(97, 1), (97, 2), (96, 4), (97, 4), (5, 4)])
def test_every_rank_sees_the_embedding_of_every_id_of_an_odd_vocabulary(vocab, size):
    tensors = random_tensors({"weight": (vocab, HIDDEN)})
    ids = torch.arange(vocab)
    for out in run_sharded(size, lambda tp: VocabEmbedding(vocab, HIDDEN, tp), tensors, lambda rank: (ids,)):
        assert torch.equal(out, tensors["weight"])


@pytest.mark.parametrize(("vocab", "size"), [(97, 1), (97, 2), (96, 4), (97, 4), (5, 4)])
def test_every_rank_has_float32_logits_of_the_whole_vocabulary_without_padding(vocab, size):
    tensors = random_tensors({"weight": (vocab, HIDDEN)})
    hidden = torch.randn(3, HIDDEN)
    for out in run_sharded(size, lambda tp: LMHead(vocab, HIDDEN, tp), tensors, lambda rank: (hidden,)):
        assert out.shape == (3, vocab)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, F.linear(hidden, tensors["weight"]))


@pytest.mark.parametrize(("vocab", "size"), [(97, 1), (97, 2), (97, 4), (5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_largest_logit_and_of_equal_ones_the_lowest_id(vocab, size, dtype):
    weight = torch.randint(-1, 2, (vocab, HIDDEN), generator=torch.Generator().manual_seed(1))  # many are equal
    hidden = torch.randint(-1, 2, (40, HIDDEN), generator=torch.Generator().manual_seed(2)).to(dtype)
    values, ids = F.linear(hidden.float(), weight.float()).max(-1)

    class Best(LMHead):
        def forward(self, hidden):
            return self.best(hidden)

    build = lambda tp: Best(vocab, HIDDEN, tp).to(dtype)  # noqa: E731
    for best, tokens in run_sharded(size, build, {"weight": weight.to(dtype)}, lambda rank: (hidden,)):
        assert torch.equal(best, values)
        assert torch.equal(tokens, ids)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_largest_logit_that_is_not_finite_is_handed_on(size, broken):
    weight = torch.randn(7, HIDDEN)
    weight[5] = broken
    hidden = torch.ones(2, HIDDEN)

    class Best(LMHead):
        def forward(self, hidden):
            return self.best(hidden)

    for best, _ in run_sharded(size, lambda tp: Best(7, HIDDEN, tp), {"weight": weight}, lambda rank: (hidden,)):
        assert not best.isfinite().any()


def test_logits_are_not_rounded_to_the_models_dtype_and_have_the_same_bits_in_any_batch():
    """In bfloat16 the first two would be equal."""
    vocab, inputs = 64, 128
    weight = torch.zeros(vocab, inputs)
    weight[:2], weight[1, 0] = 0.125, 0.1875
    hidden = torch.ones(20, inputs).bfloat16()

    for pack in (lambda head: None, LMHead.pack):
        head = build(lambda: LMHead(vocab, inputs, ShardPlan()), torch.bfloat16, "cpu")
        head.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        pack(head)
        logits = head(hidden)
        assert logits.dtype == torch.float32
        assert logits[0, :2].tolist() == [16.0, 16.0625]
        assert torch.equal(logits[:1], head(hidden[:1]))
        assert head.best(hidden)[1].tolist() == [1] * 20


def test_a_tied_head_shares_the_memory_of_the_embedding():
    embedding = VocabEmbedding(97, HIDDEN, ShardPlan())
    head = TiedLMHead(embedding)
    assert head.weight is embedding.weight
    assert head.shards() == {}


@needs_linear_kernel
def test_logits_of_strict_determinism_have_the_same_bits_whatever_part_of_the_vocabulary_a_rank_has():
    vocab, inputs = 320, 4096  # 40 rows over eight ranks, 80 over four
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors({"weight": (vocab, inputs)}).items()}
    hidden = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()

    class Packed(LMHead):
        def forward(self, hidden):
            self.pack()
            return super().forward(hidden)

    def make(tp):
        return build(lambda: Packed(vocab, inputs, in_fixed_order(tp)), torch.bfloat16, "cpu")

    (alone,) = run_sharded(1, make, tensors, lambda rank: (hidden,))
    torch.testing.assert_close(alone, F.linear(hidden.float(), tensors["weight"].float()), atol=1.0, rtol=2e-2)
    for size in (2, 4, 8):
        for logits in run_sharded(size, make, tensors, lambda rank: (hidden,)):
            assert torch.equal(logits, alone)


@needs_linear_kernel
def test_a_tied_head_that_is_packed_is_held_once():
    embedding = build(lambda: VocabEmbedding(128, HIDDEN, ShardPlan()), torch.bfloat16, "cpu")
    torch.nn.init.normal_(embedding.weight)
    ids, head = torch.tensor([127, 3, 64]), TiedLMHead(embedding)
    rows = embedding(ids)
    logits = head(rows)
    head.pack()
    assert head.weight is embedding.weight
    assert torch.equal(embedding(ids), rows)
    torch.testing.assert_close(head(rows), logits, atol=2e-2, rtol=2e-2)
