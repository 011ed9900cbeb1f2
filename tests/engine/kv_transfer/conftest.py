from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[RankPool, RankPool]]:
    """The ranks of a decode engine and of a prefill engine."""
    with RankPool() as decode, RankPool() as prefill:
        yield decode, prefill
