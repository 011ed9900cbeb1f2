from __future__ import annotations

import pytest

from engine.core.engine_stats import stats_of
from engine.core.request import Request
from engine.core.stats import BOUNDS, RequestMetrics
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.histogram import SECONDS, TOKENS, Histogram
from tests.fake_runner import Harness


def finished_request(metrics: RequestMetrics, reason: str = "length") -> Request:
    """Arrives at 10 s, is scheduled at 11, has tokens at 13, 14 and 16, and ends with the last."""
    message = GenerateRequest(request_id="a", prompt=[1, 2, 3, 4], params=SamplingParams(max_tokens=5))
    request = Request.create(message, max_model_len=100, now=10.0)
    request.clock.scheduled_at, request.clock.first_token_at = 11.0, 13.0
    for token, now in ((7, 13.0), (8, 14.0), (9, 16.0)):
        request.tokens.append(token)
        metrics.observe_tokens([request], now)
    metrics.observe_finished(request, reason, 16.0)
    return request


def test_a_request_is_measured_from_its_arrival_to_its_last_token():
    metrics = RequestMetrics()
    finished_request(metrics)
    found = {name: (h.count, h.sum) for name, h in metrics.histograms.items() if h.count}
    assert found == {
        "inter_token_latency_seconds": (2, 3.0),
        "request_time_per_output_token_seconds": (1, 1.5),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 3.0),
        "request_inference_time_seconds": (1, 5.0),
        "request_prompt_tokens": (1, 4),
        "request_generation_tokens": (1, 3),
        "request_params_max_tokens": (1, 5),
        "request_num_preemptions": (1, 0),
    }


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_of_a_request_that_was_cut_off_only_the_tokens_are_measured(reason):
    metrics = RequestMetrics()
    finished_request(metrics, reason)
    assert {name for name, h in metrics.histograms.items() if h.count} == {"inter_token_latency_seconds"}


def test_a_step_is_measured_by_its_tokens():
    metrics = RequestMetrics()
    metrics.observe_step(3)
    metrics.observe_step(2000)
    assert (metrics.histograms["iteration_tokens_total"].count, metrics.histograms["iteration_tokens_total"].sum) == (
        2,
        2003,
    )


def test_there_is_a_histogram_for_every_name():
    assert set(RequestMetrics().histograms) == set(BOUNDS)


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (1, 0), (1.5, 1), (2, 1), (1e6, 18), (1e6 + 1, 19)])
def test_a_value_counts_in_the_first_bucket_that_holds_it(value, bucket):
    histogram = Histogram.over(TOKENS)
    histogram.observe(value)
    assert histogram.counts.index(1) == bucket
    assert (histogram.count, histogram.sum) == (1, value)


def test_bounds_rise_in_steps_that_print_as_they_are_meant():
    assert SECONDS[:7] == [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
    for bounds in (SECONDS, TOKENS):
        assert bounds == sorted(set(bounds))


def test_each_kv_cache_group_counts_its_blocks_and_one_group_needs_no_count_of_its_own():
    alike, windowed = (
        Harness(num_blocks=20, max_model_len=64),
        Harness(num_blocks=20, max_model_len=64, windows=(None, 8)),
    )
    for harness in (alike, windowed):
        harness.add("a", list(range(3, 43)))
        for _ in range(5):
            harness.step()
    assert stats_of(alike.scheduler).group_blocks == {}
    whole, window = stats_of(windowed.scheduler).group_blocks.values()
    assert sum(whole.values()) == sum(window.values()) == 20
    assert whole["used"] == 11 > window["used"] > 0, "what is behind the window is not held"
    assert stats_of(windowed.scheduler).kv_usage == 11 / 20


def test_snapshots_of_states_are_counted_apart_and_do_not_fill_the_cache():
    harness = Harness(num_blocks=20, max_model_len=64, chunk=8, num_snapshots=1)
    harness.add("a", list(range(3, 43)))
    for _ in range(2):
        harness.step()
    stats = stats_of(harness.scheduler)
    assert stats.group_blocks.keys() == stats.group_block_bytes.keys() == {"0", "states"}
    assert stats.group_blocks["states"] == {"used": 0, "cached": 1, "free": 0}, "it may be evicted at any time"
    assert stats.kv_usage == stats.blocks_used / 20 < 1
