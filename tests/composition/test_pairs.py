"""Every part of an engine with every other one: equal, or refused with a reason, as docs/composition.md says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.composition.page import PAGE, read, render
from tests.composition.pairs import Pairs
from tests.composition.parts import PARTS
from tests.one_thread import one_thread

__all__ = ["one_thread"]  # pytest finds it here

FIFTHS = 5
TODAY = int(os.environ.get("TEST_DAY", time.time() // 86_400)) % FIFTHS
EACH_FIFTH = [pytest.param(i, marks=[] if i == TODAY else pytest.mark.slow, id=f"fifth_{i + 1}") for i in range(FIFTHS)]


@pytest.fixture(scope="module")
def all_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    pairs = Pairs(tmp_path_factory.mktemp("composition"))
    yield pairs
    pairs.close()


@pytest.fixture
def pairs(all_pairs: Pairs) -> Iterator[Pairs]:
    yield all_pairs
    all_pairs.end_engines()


@pytest.mark.parametrize("number", range(len(PARTS)), ids=[part.name.replace(" ", "_") for part in PARTS])
@pytest.mark.parametrize("fifth", EACH_FIFTH)
def test_a_request_has_the_bits_that_it_has_alone_whatever_two_parts_are_on(
    pairs: Pairs, fifth: int, number: int
) -> None:
    """number: of the first part; the second ones are those behind it in the table, and itself."""
    page, first, wrong = read(PAGE.read_text()), PARTS[number], {}
    for other, second in enumerate(PARTS[number:], number):
        if (number + other) % FIFTHS == fifth:
            outcome = pairs.run(first, second)
            if (expected := page.get((second.name, first.name))) != outcome:
                wrong[second.name] = f"{outcome}, and the page says {expected}"
    assert not wrong


def test_the_page_has_a_cell_for_each_pair_and_is_as_it_was_written() -> None:
    page = PAGE.read_text()
    assert render(PARTS, read(page)) == page
