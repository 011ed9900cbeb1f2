from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.ops.argmax import CHUNK, top_ids, top_ids_plain


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 3),
    vocab=st.integers(1, 12 * CHUNK),
    count=st.integers(0, 30),
    values=st.sampled_from([1, 2, 7, 1000, 10**9]),
)
def test_chunks_give_the_ids_of_a_sort_by_value_and_then_by_id(seed, rows, vocab, count, values):
    """values: how many different logits there may be; few make many ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (rows, vocab), generator=generator).float() - values / 2
    logits[torch.rand(rows, vocab, generator=generator) < 0.3] = float("-inf")  # what a grammar forbids
    sorted_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top_ids(logits, count), sorted_ids)
    assert torch.equal(top_ids_plain(logits, count), sorted_ids)


def test_zeros_of_either_sign_are_equal():
    logits = torch.zeros(1, 40 * CHUNK)
    logits[0, ::2] = -0.0
    assert top_ids(logits, 5).tolist() == [[0, 1, 2, 3, 4]]
