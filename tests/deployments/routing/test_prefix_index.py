from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deployments.routing.prefix_index import KeySet

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
