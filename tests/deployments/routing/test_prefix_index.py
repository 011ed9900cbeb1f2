from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deployments.routing.prefix_index import KeySet, PrefixIndex

LARGE = 2**64 - 1
KEYS = st.sampled_from([0, 1, 2, 3, 2**63, LARGE - 1, LARGE])


@pytest.mark.parametrize("fold_at", [0, 2, 100])
@settings(max_examples=60)
@given(start=st.lists(KEYS), steps=st.lists(st.tuples(st.lists(KEYS), st.lists(KEYS))))
def test_it_holds_what_a_set_would(fold_at, start, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.routing.prefix_index.FOLD_AT", fold_at)
        keys, truth = KeySet(start), set(start)
        for added, removed in steps:
            keys.update(added, removed)
            truth = (truth - set(removed)) | set(added)
            assert all((key in keys) == (key in truth) for key in (0, 1, 2, 3, 2**63, LARGE - 1, LARGE))
        assert keys.to_set() == truth


@given(
    there=st.lists(st.booleans(), max_size=12),
    sent=st.sets(st.integers(0, 11)),
    window=st.integers(1, 5),
    guess=st.integers(0, 12),
)
def test_where_all_layers_have_a_window_the_longest_prefix_counts_whose_last_blocks_are_there(
    there, sent, window, guess
):
    keys = list(range(len(there)))
    index = PrefixIndex()
    index.reset([key for key in keys if there[key]], window)
    index.expect(list(sent))
    known = [there[key] or key in sent for key in keys]
    longest = max(n for n in range(len(keys) + 1) if all(known[max(0, n - window) : n]))
    assert index.match(keys, min(guess, len(keys))) == longest
