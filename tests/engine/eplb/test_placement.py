"""Which experts a rank holds, by their load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.eplb.placement import (
    EMPTY,
    LEAST_GAIN,
    Placement,
    balance,
    balancedness,
    count_copies,
    find_moves,
    first_placement,
    rank_loads,
)


@st.composite
def layers(draw) -> tuple[list[int], Placement]:
    """The load of a layer's experts, and a placement that other loads have led to."""
    ranks = draw(st.integers(2, 5))
    num_experts = draw(st.integers(ranks, 20))
    slots = draw(st.integers(-(-num_experts // ranks), num_experts))
    loads = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    current = first_placement(num_experts, ranks, slots)
    for load in draw(st.lists(loads, max_size=2)):
        current = balance(load, current)
    return draw(loads), current


def held(placement: Placement) -> Counter[int]:
    return Counter(expert for experts in placement for expert in experts if expert != EMPTY)


@given(layers())
def test_every_expert_is_on_some_rank_and_at_most_once_on_each(layer):
    load, current = layer
    placement = balance(load, current)
    assert set(held(placement)) == set(range(len(load)))
    for before, experts in zip(current, placement, strict=True):
        assert len(experts) == len(before)
        assert max(Counter(expert for expert in experts if expert != EMPTY).values()) == 1


@given(layers())
def test_another_placement_lowers_the_largest_load_of_a_rank_and_the_same_load_moves_nothing_again(layer):
    load, current = layer
    placement = balance(load, current)
    if placement != current:
        assert max(rank_loads(load, placement)) < (1 - LEAST_GAIN) * max(rank_loads(load, current))
    assert balance(load, placement) == placement


@given(layers())
def test_moves_lead_from_one_placement_to_the_other_and_read_only_what_was_there_before(layer):
    load, current = layer
    wanted = balance(load, current)
    after = [list(experts) for experts in current]
    for move in find_moves(current, wanted):
        assert current[move.source][move.source_slot] == move.expert != EMPTY
        after[move.target][move.target_slot] = move.expert
    assert after == wanted


@given(layers())
def test_the_load_of_all_ranks_together_is_that_of_all_experts(layer):
    load, current = layer
    assert sum(rank_loads(load, balance(load, current))) == pytest.approx(sum(load))


def test_the_most_loaded_expert_gets_the_redundant_copies_until_its_copies_have_less_than_another():
    assert count_copies([60, 50, 10, 10], 4, 2) == [3, 3, 1, 1]
    assert count_copies([90, 1, 1], 2, 2) == [2, 1, 1]  # not a second time on a rank


def test_the_heaviest_copies_go_to_the_least_loaded_ranks_with_room():
    placement = balance([60, 50, 30, 20, 10, 10], first_placement(6, 2, 3))
    assert sorted(map(sorted, placement)) == [[0, 3, 4], [1, 2, 5]]
    assert rank_loads([60, 50, 30, 20, 10, 10], placement) == [90, 90]


def test_a_redundant_copy_of_the_one_busy_expert_halves_the_largest_load():
    load, current = [100, 1, 1, 1], first_placement(4, 2, 3)
    assert current == [[0, 1, EMPTY], [2, 3, EMPTY]]
    after = balance(load, current)
    assert held(after)[0] == 2
    assert max(rank_loads(load, after)) <= 52
    assert after[0][:2] == [0, 1]  # who can stay stays


def test_an_expert_takes_the_place_of_another_if_only_ranks_that_have_it_have_room():
    load = [100, 100, 1, 1, 1, 1, 1, 8]  # both heavy ones are on both ranks; the copies that are left are light
    placement = balance(load, first_placement(8, 2, 6))
    assert set(held(placement)) == set(range(8))
    assert all(len(set(experts)) == 6 for experts in placement)


def test_equal_loads_and_no_load_move_nothing():
    current = first_placement(8, 4, 3)
    assert balance([5] * 8, first_placement(8, 4, 2)) == first_placement(8, 4, 2)
    assert balance([0] * 8, current) == current


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(5, 2, 2), (2, 2, 3)])
def test_slots_that_experts_cannot_fill_are_refused(experts, ranks, slots):
    with pytest.raises(ValueError, match="do not fill"):
        balance([1] * experts, [[EMPTY] * slots for _ in range(ranks)])


def test_balancedness_is_vllms_mean_over_maximum_summed_over_layers():
    assert balancedness([[4, 2], [1, 1]]) == (3 + 1) / (4 + 1)
    assert balancedness([[0, 0]]) == balancedness([]) == 1
