"""Daily files of usage."""

from __future__ import annotations

import asyncio
import csv
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster.config import AppConfig
from deployments.billing import usage_files
from deployments.billing.totals import UsageTotals, payer_of
from deployments.billing.usage_files import UsageConfig, UsageFiles
from deployments.observability.stats import MAX_NAMES, OTHERS, ModelStats
from engine.errors import ConfigError

USED = UsageTotals(1, 10, 4, 5, compute_s=0.5, wasted_s=0.25, kv_gib_s=0.1, cost=0.02)


class Time:
    now = datetime(2026, 12, 31, 22, 59, 59, tzinfo=UTC).timestamp()


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_each_hour_key_model_and_adapter_has_a_line_in_the_file_of_its_day(tmp_path: Path):
    time = Time()
    files = UsageFiles(UsageConfig(folder=str(tmp_path), currency="EUR"), "ingress-1", lambda: time.now)
    for seconds, key, adapter in ((0, "a", None), (1, "a", None), (1, "a", None), (1, "b", "own"), (3601, "a", None)):
        time.now = Time.now + seconds
        files.add(key, "large", adapter, USED)
    files.write()
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
    files.add("c", "large", None, USED)
    files.write()
    assert rows(tmp_path / names[0]) == old, "a day that has ended stays as it was written"
    assert len(rows(tmp_path / names[1])) == 2
    time.now = Time.now  # a clock that is set back over midnight
    files.add("c", "large", None, USED)
    files.write()
    assert [row for row in rows(tmp_path / names[0]) if row["SubAccountId"] != "c"] == old, "nothing is lost"


def test_what_was_used_is_written_at_the_end_too_and_a_folder_that_is_gone_ends_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(usage_files, "WRITE_S", 0.001)

    async def scenario() -> None:
        files = UsageFiles(UsageConfig(folder=str(tmp_path / "new")), "i")
        (tmp_path / "new").rmdir()
        async with files.written():
            files.add("a", "large", None, USED)
            await asyncio.sleep(0.02)
            (tmp_path / "new").mkdir()
        assert len(list((tmp_path / "new").iterdir())) == 1

    asyncio.run(scenario())


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
