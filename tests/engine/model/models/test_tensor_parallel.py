from __future__ import annotations

import pytest

from tests.models import FAMILIES, make_model, with_slow
from tests.products import each_once
from tests.ranks import check_ranks


# with four ranks, each of the 2 KV heads is held twice
@pytest.mark.parametrize(("family", "size"), each_once(with_slow(FAMILIES), [2, 4]))
def test_every_rank_has_the_logits_of_the_unsharded_model(tmp_path, family, size):
    check_ranks(make_model(tmp_path, family), size)
