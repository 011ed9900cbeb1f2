from deployments.replicas.scaling_report import ReplicaReport, queue_report
from engine.core.stats import RequestMetrics
from engine.wire.messages import EngineStatus
from engine.wire.part_record import encoded
from engine.wire.parts.handoffs import HandoffTotals
from tests.engine_stats import engine_stats


def status() -> EngineStatus:
    histograms = RequestMetrics().histograms
    for seconds in (0.01, 0.03):
        histograms["inter_token_latency_seconds"].observe(seconds)
    stats = engine_stats(
        running=3,
        waiting=2,
        receiving=4,
        leased=1,
        queued_tokens=500,
        blocks_total=100,
        blocks_free=50,
        blocks_cached=30,
        blocks_used=20,
        steps=9,
        prompt_tokens=1000,
        generation_tokens=77,
        prefix_queried_tokens=1000,
        prefix_hit_tokens=160,
        prefill_tokens=840,
        prefills=6,
        decode_seconds_per_step=0.01,
        decode_seconds_per_sequence=0.002,
        prompt_seconds_per_token=0.003,
        parts=encoded(
            HandoffTotals(
                {"local": {"short_prompt": 2, "saturated": 3, "no_prefill_replica": 1}, "remote": {"policy": 9}}
            )
        ),
        histograms=histograms,
    )
    return EngineStatus(engine_id="decode-m-1", ended=[], stats=stats, last_step_age_s=0.0)


def test_a_replica_reports_its_sequences_by_whether_they_hold_blocks():
    report = ReplicaReport.of(status())
    assert (report.running, report.waiting) == (8, 2)
    assert (report.blocks_used, report.blocks_total) == (20, 100)


def test_a_replica_reports_which_prompts_it_computed_for_want_of_another():
    report = ReplicaReport.of(status())
    assert (report.local_total, report.spilled_total) == (6, 4)
    assert (report.prefill_tokens_total, report.prefills_total, report.cached_tokens_total) == (840, 6, 160)


def test_a_replica_reports_what_its_steps_cost_and_how_its_tokens_came():
    report = ReplicaReport.of(status())
    assert (report.decode_step_s, report.decode_sequence_s, report.token_s) == (0.01, 0.002, 0.003)
    assert (report.output_tokens_total, report.itl_total, round(report.itl_s_total, 6)) == (77, 2, 0.04)


def test_serve_gets_nothing_but_numbers_by_name():
    numbers = {**ReplicaReport.of(status()).numbers(), **queue_report("m", 3, 700)}
    assert all(isinstance(value, int | float) for value in numbers.values())
    assert (numbers["waiting/m"], numbers["waiting_tokens/m"]) == (3, 700)


def test_engines_that_share_experts_are_reported_as_one_replica_that_is_faster():
    one, both = ReplicaReport.of(status()), ReplicaReport.of_all([status(), status()])
    assert ReplicaReport.of_all([status()]) == one
    assert (both.running, both.blocks_total, both.output_tokens_total) == (16, 200, 154)
    assert (both.decode_step_s, both.decode_sequence_s, both.token_s) == (0.01, 0.001, 0.0015)
