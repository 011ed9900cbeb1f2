"""Daily files of usage."""

from __future__ import annotations

import asyncio
import csv
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cluster.config.app_config import AppConfig
from deployments.billing import usage_files
from deployments.billing.hourly_usage import HourlyUsage
from deployments.billing.totals import OTHERS, UsageTotals, payer_of
from deployments.billing.usage_files import UsageConfig, UsageFiles
from deployments.observability.stats import MAX_NAMES, ModelStats
from engine.errors import ConfigError

USED = UsageTotals(1, 10, 4, 5, compute_s=0.5, wasted_s=0.25, kv_gib_s=0.1, cost=0.02)


class Time:
    now = datetime(2026, 12, 31, 22, 59, 59, tzinfo=UTC).timestamp()


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_each_hour_key_model_and_adapter_has_a_line_in_the_file_of_its_day(tmp_path: Path):
    time = Time()
    usage = HourlyUsage(lambda: time.now)
    files = UsageFiles(UsageConfig(folder=str(tmp_path), currency="EUR"), "ingress-1", usage)
    for seconds, key, adapter in ((0, "a", None), (1, "a", None), (1, "a", None), (1, "b", "own"), (3601, "a", None)):
        time.now = Time.now + seconds
        usage.add(key, "large", adapter, USED)
    asyncio.run(files.write())
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["manta-usage-2026-12-31-ingress-1.csv", "manta-usage-2027-01-01-ingress-1.csv"]
    old, new = (rows(tmp_path / name) for name in names)
    assert [(r["ChargePeriodStart"], r["SubAccountId"], r["ResourceId"], r["x_Sequences"]) for r in old] == [
        ("2026-12-31T22:00:00Z", "a", "large", "1"),
        ("2026-12-31T23:00:00Z", "a", "large", "2"),
        ("2026-12-31T23:00:00Z", "b", "own", "1"),
    ]
    assert float(old[1]["BilledCost"]) == 0.04 and old[1]["BillingCurrency"] == "EUR"
    assert float(old[1]["ConsumedQuantity"]) == 1.0 and old[1]["ConsumedUnit"] == "Seconds"
    assert old[0]["BillingPeriodEnd"] == new[0]["BillingPeriodStart"] == "2027-01-01T00:00:00Z"
    usage.add("c", "large", None, USED)
    asyncio.run(files.write())
    assert rows(tmp_path / names[0]) == old, "a day that has ended stays as it was written"
    assert len(rows(tmp_path / names[1])) == 2
    time.now = Time.now  # a clock that is set back over midnight
    usage.add("c", "large", None, USED)
    asyncio.run(files.write())
    assert [row for row in rows(tmp_path / names[0]) if row["SubAccountId"] != "c"] == old, "nothing is lost"


async def test_what_was_used_is_written_at_the_end_too_and_a_folder_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(usage_files, "WRITE_S", 0.001)
    files = UsageFiles(UsageConfig(folder=str(tmp_path / "new")), "i")
    (tmp_path / "new").rmdir()
    async with files.written():
        files.usage.add("a", "large", None, USED)
        await asyncio.sleep(0.02)
        (tmp_path / "new").mkdir()
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_slow_folder_stops_nothing_else_and_what_is_used_while_it_is_written_is_written_next(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(usage_files, "WRITE_S", 0.001)
    begun, go_on = threading.Event(), threading.Event()
    real = UsageFiles._write

    def slow(*args: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        real(*args)

    monkeypatch.setattr(UsageFiles, "_write", slow)

    async def scenario() -> None:
        files = UsageFiles(UsageConfig(folder=str(tmp_path)), "i")
        async with files.written():
            files.usage.add("a", "large", None, USED)
            while not begun.is_set():
                await asyncio.sleep(0.001)  # the loop runs on
            files.usage.add("a", "large", None, USED)
            asyncio.get_running_loop().call_later(0.02, go_on.set)
        assert not files.usage.unwritten

    asyncio.run(scenario())
    (file,) = tmp_path.iterdir()
    assert rows(file)[0]["x_Sequences"] == "2"


async def test_a_folder_that_never_answers_delays_the_end_for_a_while_only(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(usage_files, "CLOSE_S", 0.01)
    go_on = threading.Event()
    monkeypatch.setattr(UsageFiles, "_write", lambda *args: go_on.wait(60))
    files = UsageFiles(UsageConfig(folder=str(tmp_path)), "i")
    async with files.written():
        files.usage.add("a", "large", None, USED)
    assert "the folder does not answer" in caplog.text
    go_on.set()


def test_usage_is_forgotten_after_yesterday_unless_it_must_still_be_written():
    time = Time()
    usage = HourlyUsage(lambda: time.now)
    days = []
    for _ in range(4):
        usage.add("a", "large", None, USED)
        days.append({line.day.day for line in usage.lines})
        time.now += 86400
    assert days == [{31}, {31, 1}, {1, 2}, {2, 3}]
    usage.unwritten = {line.day: 1 for line in usage.lines}
    time.now += 10 * 86400
    usage.add("a", "large", None, USED)
    assert {line.day.day for line in usage.lines} == {2, 3, 14}


def test_only_so_many_lines_are_told_apart_and_the_others_are_summed_by_hour_and_model():
    usage = HourlyUsage(lambda: Time.now)
    for i in range(5):
        usage.add(f"key-{i}", "large", None, UsageTotals(1, compute_s=float(i)))
    newest = usage.newest(usage.now - timedelta(hours=1), 2)
    assert [(line.key, used.compute_s) for line, used in newest] == [("key-4", 4.0), ("key-3", 3.0), (OTHERS, 3.0)]
    assert usage.newest(usage.now + timedelta(hours=1), 2) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"ingress\.usage_dir"):
        UsageFiles(UsageConfig(folder=str(tmp_path / "file" / "folder")), "i")


def test_metrics_tell_only_so_many_keys_apart():
    stats = ModelStats()
    for i in range(MAX_NAMES + 5):
        stats.count_usage(f"key-{i}", USED)
    assert len(stats.usage) == MAX_NAMES + 1
    assert stats.usage[OTHERS].sequences == 5


def test_batches_are_paid_by_their_key_and_clients_without_a_key_have_no_name():
    clients = ("key:alice", "batch:alice", "user:bob", "address:127.0.0.1")
    assert [payer_of(client) for client in clients] == ["alice", "alice", "", ""]


def test_the_configuration_names_folder_and_currency():
    ingress = {"usage_dir": "/usage", "currency": "EUR"}
    config = AppConfig.parse({"models": [{"name": "pocket", "model": "pocket"}], "ingress": ingress})
    assert config.ingress.usage_config() == UsageConfig(folder="/usage", currency="EUR")
