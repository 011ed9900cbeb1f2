"""What keys have used in each hour."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from deployments.billing.hourly_usage import HourlyUsage
from deployments.billing.totals import OTHERS, UsageTotals, payer_of
from deployments.observability.stats import MAX_NAMES, ModelStats

USED = UsageTotals(1, 10, 4, 5, compute_s=0.5, wasted_s=0.25, kv_gib_s=0.1, cost=0.02)


class Time:
    now = datetime(2026, 12, 31, 22, 59, 59, tzinfo=UTC).timestamp()


def test_each_hour_key_model_and_adapter_has_a_line():
    time = Time()
    usage = HourlyUsage(lambda: time.now)
    for seconds, key, adapter in ((0, "a", None), (1, "a", None), (1, "a", None), (1, "b", "own"), (3601, "a", None)):
        time.now = Time.now + seconds
        usage.add(key, "large", adapter, USED)
    assert [(line.hour.hour, line.key, line.adapter, used.sequences) for line, used in usage.lines.items()] == [
        (22, "a", "", 1),
        (23, "a", "", 2),
        (23, "b", "own", 1),
        (0, "a", "", 1),
    ]
    time.now = Time.now  # a clock that is set back over midnight
    usage.add("c", "large", None, USED)
    assert len(usage.lines) == 5, "nothing is lost"


def test_usage_is_forgotten_after_yesterday():
    time = Time()
    usage = HourlyUsage(lambda: time.now)
    days = []
    for _ in range(4):
        usage.add("a", "large", None, USED)
        days.append({line.day.day for line in usage.lines})
        time.now += 86400
    assert days == [{31}, {31, 1}, {1, 2}, {2, 3}]


def test_only_so_many_lines_are_told_apart_and_the_others_are_summed_by_hour_and_model():
    usage = HourlyUsage(lambda: Time.now)
    for i in range(5):
        usage.add(f"key-{i}", "large", None, UsageTotals(1, compute_s=float(i)))
    newest = usage.newest(usage.now - timedelta(hours=1), 2)
    assert [(line.key, used.compute_s) for line, used in newest] == [("key-4", 4.0), ("key-3", 3.0), (OTHERS, 3.0)]
    assert usage.newest(usage.now + timedelta(hours=1), 2) == []


def test_metrics_tell_only_so_many_keys_apart():
    stats = ModelStats()
    for i in range(MAX_NAMES + 5):
        stats.count_usage(f"key-{i}", USED)
    assert len(stats.usage) == MAX_NAMES + 1
    assert stats.usage[OTHERS].sequences == 5


def test_batches_are_paid_by_their_key_and_clients_without_a_key_have_no_name():
    clients = ("key:alice", "batch:alice", "user:bob", "address:127.0.0.1")
    assert [payer_of(client) for client in clients] == ["alice", "alice", "", ""]
