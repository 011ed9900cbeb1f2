from __future__ import annotations

import pytest

from engine.costs.draft_cost import DraftCost, ProposalCost, VerifyingCost


def test_a_token_costs_what_steps_that_propose_take_longer():
    cost = ProposalCost()
    assert cost.of(4) == (0.0, 0.0)
    for tokens, seconds in ((0, 0.1), (3, 9.0), (3, 0.4), (1, 0.2), (0, 0.1)):
        cost.observe_step(4, tokens, seconds)
    assert cost.of(4) == pytest.approx((0.1, (0.3 - 0.1) / 2)), "the first step that proposed caught up"


def test_each_number_of_sequences_has_a_cost_of_its_own_and_others_that_of_the_nearest():
    cost = ProposalCost()
    for sequences, seconds in ((1, 0.1), (16, 0.8)):
        for _ in range(2):
            cost.observe_step(sequences, 1, seconds)
    assert [cost.of(n)[1] for n in (1, 3, 15, 31, 64)] == pytest.approx([0.1, 0.1, 0.8, 0.8, 0.8])


def test_what_a_token_costs_is_learned_anew():
    cost = ProposalCost()
    for seconds in (1.0, *[0.5] * 100, *[0.1] * 2000):
        cost.observe_step(1, 2, seconds)
    assert cost.of(1)[1] == pytest.approx(0.05, rel=0.01)


def test_what_a_drafter_takes_is_no_part_of_the_cost_of_a_token():
    cost = DraftCost()
    for i in range(200):
        drafts = i % 4
        cost.observe_step(2, drafts, 3, 0.01 + 0.001 * (2 + drafts) + 0.006, 0.006)
        cost.observe_step(2, 0, 0, 0.012, 0.0)
    assert cost.of(2) == pytest.approx((0.01, 0.001, 0.002), rel=0.1)


def test_a_drafted_token_seems_cheap_until_steps_with_some_were_measured_and_the_first_of_a_size_does_not_count():
    cost = VerifyingCost()
    cost.observe_step(1, 5.0)
    assert cost.coefficients == (0.0, 0.0)
    for _ in range(100):
        cost.observe_step(1, 0.010)
    assert cost.coefficients == pytest.approx((0.010, 0.0))
    slopes = []
    for seconds in [5.0, *[0.014] * 200]:
        cost.observe_step(5, seconds)
        slopes.append(cost.coefficients[1])
    assert slopes[0] == 0.0 < slopes[20] < slopes[-1] == pytest.approx(0.001, rel=0.1)


def test_neither_part_of_the_cost_is_ever_negative():
    falling, steep = VerifyingCost(), VerifyingCost()
    for _ in range(9):
        for cost, times in ((falling, (5.0, 1.0)), (steep, (1.0, 10.0))):
            for tokens, seconds in zip((10, 20), times, strict=True):
                cost.observe_step(tokens, seconds)
    assert falling.coefficients == pytest.approx((3.0, 0.0))
    assert steep.coefficients[0] == 0.0 < steep.coefficients[1]
