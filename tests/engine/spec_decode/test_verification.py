"""What a step says about the drafts that it has verified."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from engine.spec_decode.verification import accepted_tokens, last_rows

TOKEN = st.integers(0, 2)
SAMPLED = st.integers(-1, 2)  # -1: nothing could be sampled


@st.composite
def sequences(draw):
    """Drafts, and the tokens that were sampled at their positions and after them."""
    drafts = draw(st.lists(TOKEN, max_size=4))
    right = draw(st.integers(0, len(drafts)))
    rest = len(drafts) + 1 - right
    return drafts, drafts[:right] + draw(st.lists(SAMPLED, min_size=rest, max_size=rest))


@given(st.lists(sequences(), min_size=1, max_size=5))
def test_the_newest_token_of_each_sequence_follows_its_own_row_whatever_could_not_be_sampled(steps):
    expected, first = [], 0
    for drafts, sampled in steps:
        expected.append(10 * (first + len(accepted_tokens(sampled, drafts)) - 1))
        first += len(sampled)
    tokens = torch.tensor([token for _, sampled in steps for token in sampled])
    counts, all_drafts = [len(drafts) for drafts, _ in steps], [token for drafts, _ in steps for token in drafts]
    drafted = torch.tensor(all_drafts, dtype=torch.int32)
    rows = last_rows(10 * torch.arange(first), tokens, counts, drafted)
    assert rows.tolist() == expected
