from __future__ import annotations

import math

import pytest

from deployments.frontend.calibration import Calibration
from deployments.frontend.latency_forecast import LatencyForecast
from deployments.observability.stats import ModelStats
from tests.engine_stats import engine_stats

TWO_ENGINES = LatencyForecast(
    num_prompt_engines=2, num_decode_engines=2, prompt_token_s=0.001, step_s=0.01, sequence_s=0.002
)


def test_prompts_that_are_ahead_delay_the_first_token():
    assert TWO_ENGINES.first_token_s(100, 0) == pytest.approx(0.11)
    assert TWO_ENGINES.first_token_s(100, 600) == pytest.approx(0.41)


def test_sequences_that_run_beside_it_delay_each_token():
    assert TWO_ENGINES.per_token_s(0) == pytest.approx(0.012)
    assert TWO_ENGINES.per_token_s(6) == pytest.approx(0.018)


def test_nothing_is_expected_of_engines_that_have_not_reported_costs():
    assert LatencyForecast().first_token_s(1, 0) is None
    assert LatencyForecast().per_token_s(0) is None
    idle = LatencyForecast.of([engine_stats()], [])
    assert (idle.first_token_s(1, 0), idle.per_token_s(0)) == (None, None)


def test_prompts_cost_what_prefill_engines_take_if_there_are_any():
    decode = engine_stats(prompt_seconds_per_token=0.5, decode_seconds_per_step=0.01, queued_tokens=10)
    prefill = engine_stats(
        prompt_seconds_per_token=0.001, queued_tokens=190, prefix_queried_tokens=100, prefix_hit_tokens=50
    )
    found = LatencyForecast.of([decode], [prefill, prefill])
    assert (found.num_prompt_engines, found.num_decode_engines) == (2, 1)
    assert found.first_token_s(100, 0) == pytest.approx(0.001 * (390 / 2 + 100 / 2) + 0.01)


def answer(calibration: Calibration, first_s: float, tokens: int = 3, *, one_sequence: bool = True) -> None:
    request = calibration.tell(0.0, 1.0, 0.1, waits=False)
    for i in range(tokens):
        request.add(1, first_s + 0.2 * i)
    calibration.ended(request, first_s + 1, one_sequence=one_sequence)


def test_what_came_is_compared_with_what_was_expected():
    stats = ModelStats()
    calibration = Calibration(stats)
    for _ in range(20):
        answer(calibration, 2.0)
    first, per_token = (stats.latency_ratios[latency]["no"] for latency in ("first_token", "per_token"))
    assert (first.count, first.sum, per_token.count, per_token.sum) == (20, 40, 20, pytest.approx(40))
    assert stats.latency_margins["first_token"] == {"no": 2.0, "yes": math.inf}
    outcomes = stats.latency_bounds["first_token"]["no"]
    assert outcomes["beyond"] == 0 < outcomes["unknown"] < outcomes["within"]
    told = calibration.tell(0.0, 3.0, None, waits=False)
    assert told.first_token is not None and told.first_token.bound_s == 6.0
    assert told.per_token is None


def test_tokens_of_several_sequences_say_nothing_about_the_time_per_token():
    stats = ModelStats()
    answer(Calibration(stats), 2.0, one_sequence=False)
    assert stats.latency_ratios["first_token"]["no"].count == 1
    assert stats.latency_ratios["per_token"]["no"].count == 0


def test_client_that_leaves_without_a_token_counts_only_if_the_token_was_late():
    stats = ModelStats()
    calibration = Calibration(stats)
    for _ in range(20):
        answer(calibration, 2.0)
    for seconds, beyond in ((1.9, 0), (2.1, 1)):
        calibration.ended(calibration.tell(0.0, 1.0, None, waits=False), seconds, one_sequence=True)
        assert stats.latency_bounds["first_token"]["no"]["beyond"] == beyond
