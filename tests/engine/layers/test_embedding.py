from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.layers.embedding import LMHead, TiedLMHead, VocabEmbedding
from engine.tp_group import TPGroup
from tests.engine.layers.sharding import random_tensors, run_sharded

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


def test_a_tied_head_shares_the_memory_of_the_embedding():
    embedding = VocabEmbedding(97, HIDDEN, TPGroup.single())
    head = TiedLMHead(embedding)
    assert head.weight is embedding.weight
    assert head.shards() == {}
