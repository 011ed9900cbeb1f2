import pytest

from engine.costs.step_cost import WARM_UP_STEPS, DecodeCost, LinearCost, StepCost, StepTimes, StepWork
from engine.wire.plan import StepPlan


def test_a_line_is_found_from_its_points():
    cost = LinearCost(memory=1000.0)
    for x in (1, 10, 100):
        cost.observe(x, 0.5 + 0.25 * x)
    assert cost.coefficients == pytest.approx((0.5, 0.25))
    assert cost.of(40) == pytest.approx(10.5)


def test_points_of_one_size_say_nothing_of_the_slope():
    cost = LinearCost(memory=1000.0)
    for seconds in (2.0, 4.0):
        cost.observe(7, seconds)
    assert cost.coefficients == pytest.approx((3.0, 0.0), rel=1e-3)


def test_neither_part_is_ever_negative():
    falling, steep = LinearCost(memory=1000.0), LinearCost(memory=1000.0)
    falling.observe(1, 5.0)
    falling.observe(10, 1.0)
    assert falling.coefficients[1] == 0.0
    steep.observe(10, 1.0)
    steep.observe(20, 10.0)
    assert steep.coefficients[0] == 0.0 and steep.coefficients[1] > 0.0


def test_what_was_measured_long_ago_fades():
    cost = LinearCost(memory=10.0)
    for seconds_per_unit in [9.0] * 50 + [1.0] * 100:
        for x in (1, 2):
            cost.observe(x, seconds_per_unit * x)
    assert cost.of(2) == pytest.approx(2.0, rel=1e-3)


def test_many_decode_steps_do_not_wash_out_what_a_prompt_has_shown():
    cost = StepCost()
    cost.observe_step(2000, 2.0)
    for _ in range(500):
        cost.observe_step(4, 0.03)
    assert cost.coefficients[1] == pytest.approx(0.001, rel=0.05)


def test_without_observations_the_prior_holds_and_it_returns_when_all_is_forgotten():
    cost = LinearCost(memory=100.0, prior_s=0.5)
    assert cost.of(10) == 0.5
    cost.observe(10, 7.0)
    assert cost.of(10) == pytest.approx(7.0)
    for _ in range(100):
        cost.forget(0.02)
    assert cost.of(10) == 0.5


def test_decode_steps_of_two_sizes_give_the_cost_of_a_sequence():
    cost = DecodeCost()
    for sequences in (1, 4, 30):
        cost.observe_step(sequences, 0.01 + 0.002 * sequences)
    assert cost.coefficients == pytest.approx((0.01, 0.002))


def test_a_load_that_never_changes_does_not_wash_out_what_other_loads_cost():
    cost = DecodeCost()
    for sequences in (1, 2, 4, 8):
        cost.observe_step(sequences, 0.01 + 0.002 * sequences)
    for i in range(100_000):
        cost.observe_step(16, 0.042 + 1e-4 * (-1) ** i)
    assert cost.coefficients == pytest.approx((0.01, 0.002), rel=0.02)


def test_with_one_size_known_half_of_a_decode_step_is_due_to_its_sequences():
    cost = DecodeCost()
    assert cost.coefficients == (0.0, 0.0)
    cost.observe_step(8, 0.016)
    cost.observe_step(8, 0.024)
    assert cost.coefficients == pytest.approx((0.010, 0.00125))


def plan(counts: list[int], samples: list[bool]) -> StepPlan:
    return StepPlan(1, [], [], list(range(len(counts))), [0] * len(counts), counts, samples)


def test_a_step_is_told_apart_by_what_its_sequences_compute():
    # a prompt's end, a part of one, one that waits for its grammar with its last token, and two that decode
    assert StepWork.of(plan([40, 64, 1, 1, 1], [True, False, False, True, True])) == StepWork(2, 105, 1)


def test_prompt_tokens_count_from_the_first_step_and_times_only_after_warming_up():
    times = StepTimes()
    for _ in range(WARM_UP_STEPS):
        times.observe_step(StepWork(2, 10, 1), 5.0)
    assert (times.prefill_tokens, times.prefills) == (10 * WARM_UP_STEPS, WARM_UP_STEPS)
    assert times.by_tokens.coefficients == (0.0, 0.0)
    for tokens in (10, 100):
        times.observe_step(StepWork(2, tokens, 1), 0.01 + 0.001 * (tokens + 2))
    assert times.by_tokens.coefficients == pytest.approx((0.01, 0.001), rel=0.01)
    assert times.by_sequences.coefficients == (0.0, 0.0), "none of these steps only decoded"
    assert times.prompt_token_s == pytest.approx(0.00122, rel=0.01)
    times.observe_step(StepWork(4, 0, 0), 0.02)
    assert times.by_sequences.coefficients == pytest.approx((0.01, 0.0025))


def test_a_prompt_token_costs_what_a_step_takes_longer_than_its_decoding_alone():
    times = StepTimes()
    for _ in range(WARM_UP_STEPS + 1):
        times.observe_step(StepWork(4, 0, 0), 0.02)
    assert times.prompt_token_s == 0.0
    times.observe_step(StepWork(4, 500, 1), 0.02 + 0.5)
    times.observe_step(StepWork(0, 500, 1), 0.5)
    assert times.prompt_token_s == pytest.approx(0.001)


def test_prompt_chunks_of_one_size_tell_the_cost_of_a_token():
    times = StepTimes()
    for seconds in [9.0] * WARM_UP_STEPS + [0.2, 0.3, 0.25] * 5:
        times.observe_step(StepWork(0, 2048, 1), seconds)
    assert times.prompt_token_s == pytest.approx(0.25 / 2048, rel=0.05)
