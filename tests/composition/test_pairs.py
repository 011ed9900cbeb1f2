"""Every part of an engine with every other one: equal, or refused with a reason, as docs/composition.md says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement

import pytest

from tests.composition.page import PAGE, read, render
from tests.composition.pairs import Pairs
from tests.composition.parts import PARTS
from tests.one_thread import one_thread

__all__ = ["one_thread"]  # pytest finds it here

DAY = int(os.environ.get("TEST_DAY", time.time() // 86_400))
COUNT = len(PARTS)
EACH = range(COUNT)
IDS = [part.name.replace(" ", "_") for part in PARTS]
TURNS = {2 * DAY % COUNT, (2 * DAY + 1) % COUNT}


def is_today(number: int, other: int) -> bool:
    """Whether `make test` runs a pair today. As in a round-robin tournament, each part meets one other in each turn."""
    return (number + other) % COUNT in TURNS


TODAY = [
    pytest.param(i, j, id=f"{IDS[i]}-{IDS[j]}") for i, j in combinations_with_replacement(EACH, 2) if is_today(i, j)
]


@pytest.fixture(scope="module")
def all_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    pairs = Pairs(tmp_path_factory.mktemp("composition"))
    yield pairs
    pairs.close()


@pytest.fixture
def pairs(all_pairs: Pairs) -> Iterator[Pairs]:
    yield all_pairs
    all_pairs.end_engines()


def check(pairs: Pairs, number: int, others: Iterable[int]) -> None:
    page, first, wrong = read(PAGE.read_text()), PARTS[number], {}
    for second in [PARTS[other] for other in others]:
        outcome = pairs.run(first, second)
        if (expected := page.get((second.name, first.name))) != outcome:
            wrong[second.name] = f"{outcome}, and the page says {expected}"
    assert not wrong


@pytest.mark.parametrize(("number", "other"), TODAY)
def test_a_request_has_the_bits_that_it_has_alone_whatever_two_parts_are_on(
    pairs: Pairs, number: int, other: int
) -> None:
    check(pairs, number, [other])


@pytest.mark.slow
@pytest.mark.parametrize("number", EACH, ids=IDS)
def test_a_request_has_these_bits_with_each_part_and_any_that_is_not_its_turn_today(pairs: Pairs, number: int) -> None:
    check(pairs, number, [other for other in EACH[number:] if not is_today(number, other)])


def test_the_page_has_a_cell_for_each_pair_and_is_as_it_was_written() -> None:
    page = PAGE.read_text()
    assert render(PARTS, read(page)) == page
