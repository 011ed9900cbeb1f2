from __future__ import annotations

import pytest

from tests.models import FAMILIES, make_model
from tests.ranks import check_ranks


@pytest.mark.parametrize("size", [2, 4])  # 2 KV heads: with four ranks each is held twice
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_has_the_logits_of_the_unsharded_model(tmp_path, family, size):
    check_ranks(make_model(tmp_path, family), size)
