"""What the console shows of costs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from cluster.config.app_config import AppConfig
from deployments.billing.hourly_usage import UsageLine
from deployments.billing.prices import Prices
from deployments.billing.totals import OTHERS, UsageTotals
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.observability.telemetry import IngressUsage, NoPeers, Telemetry
from deployments.parts.console.costs_view import MAX_ROWS, CostsView
from deployments.parts.console.engine_hours import HOUR_S, EngineHours, parts
from deployments.replicas.pools import ModelReplicas, ReplicaStatus
from engine.wire.messages import EngineStatus
from engine.wire.part_record import encoded
from engine.wire.parts.costs import CostStats, SequenceCost
from tests.deployments.fake_api import fake_api, says
from tests.engine_stats import engine_stats

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
HOUR = NOON.timestamp()


def replicas(**costs: dict[str, float]) -> list[ModelReplicas]:
    """One model's engines, by what they have spent."""
    statuses = [
        ReplicaStatus.of(
            EngineStatus(
                engine_id=name,
                ended=[],
                stats=engine_stats(
                    parts=encoded(CostStats(seconds)), prompt_seconds_per_token=0.002 if seconds["requests"] else 0.0
                ),
                last_step_age_s=0.0,
            ),
            {},
        )
        for name, seconds in costs.items()
    ]
    return [ModelReplicas("m", statuses, [], [], asleep=False)]


def spent(requests: float, idle: float) -> dict[str, float]:
    return {"requests": requests, "idle": idle}


def test_each_second_of_an_engine_is_in_one_hour_also_those_before_it_was_first_seen_and_after_it_began_anew():
    now = HOUR + 900
    hours = EngineHours({}, lambda: now)
    hours.observe(replicas(a=spent(600.0, 1200.0)))  # half an hour, half of it in the hour before
    assert hours.hours == {
        HOUR - HOUR_S: pytest.approx({"requests": 300.0, "idle": 600.0}),
        HOUR: pytest.approx({"requests": 300.0, "idle": 600.0}),
    }
    now += 60
    hours.observe(replicas(a=spent(630.0, 1230.0), b=spent(0.0, 10.0)))
    assert hours.hours[HOUR] == pytest.approx({"requests": 330.0, "idle": 640.0})
    now += 60
    hours.observe(replicas(a=spent(5.0, 15.0)))
    assert hours.hours[HOUR] == pytest.approx({"requests": 335.0, "idle": 655.0})
    assert hours.prompt_token_s == {"m": 0.002}
    now += 26 * HOUR_S
    hours.observe([])
    assert hours.hours == {} == hours._seen


def test_time_is_divided_among_its_hours_and_what_is_too_long_ago_is_left_out():
    assert dict(parts(HOUR - 60, HOUR + 60)) == {HOUR - HOUR_S: 0.5, HOUR: 0.5}
    assert dict(parts(HOUR, HOUR)) == {} == dict(parts(HOUR, HOUR - 60))
    old = dict(parts(HOUR - 48 * HOUR_S, HOUR))
    assert min(old) == HOUR - 24 * HOUR_S and sum(old.values()) == pytest.approx(0.5)


def test_costs_are_summed_by_key_model_adapter_and_hour_and_cached_tokens_are_worth_what_computing_them_costs():
    used = UsageTotals(1, 100, 50, 10, compute_s=1.0, wasted_s=0.25, kv_gib_s=0.5, cost=0.1)
    lines = [
        (UsageLine(NOON, "a", "m", ""), used),
        (UsageLine(NOON, "b", "m", "tuned"), used),
        (UsageLine(NOON.replace(hour=11), "a", "unknown", ""), used),
        (UsageLine(NOON.replace(day=25, hour=11), "old", "m", ""), used),
    ]
    view = CostsView.of(lines, {HOUR: {"idle": 2.0}}, {"m": 0.01}, HOUR + 60, "EUR")

    def shown(rows: list[Any]) -> list[tuple[str, float, float]]:
        return [(row.name, row.used.compute_s, row.saved_s) for row in rows]

    assert shown(view.by_key) == [("a", 2.0, 0.5), ("b", 1.0, 0.5)]
    assert shown(view.by_model) == [("m", 2.0, 1.0), ("unknown", 1.0, 0.0)]
    assert shown(view.by_adapter) == [("", 2.0, 0.5), ("tuned", 1.0, 0.5)]
    assert shown(view.by_hour) == [("2026-11-26T12:00:00Z", 2.0, 1.0), ("2026-11-26T11:00:00Z", 1.0, 0.0)]
    assert lines[0][1] == used, "nothing is counted where it is kept"


def test_a_table_has_so_many_rows_and_one_for_all_others():
    lines = [(UsageLine(NOON, f"key-{i}", "m", ""), UsageTotals(1, compute_s=float(i))) for i in range(MAX_ROWS + 3)]
    lines.append((UsageLine(NOON, OTHERS, "m", OTHERS), UsageTotals(5, compute_s=1000.0)))
    rows = CostsView.of(lines, {}, {}, HOUR, "USD").by_key
    assert len(rows) == MAX_ROWS + 1
    assert (rows[-1].name, rows[-1].used.sequences) == (OTHERS, 3 + 5)


class OtherIngress(NoPeers):
    async def ask(self, what: str, kind: type[Any], *args: str) -> list[Any]:
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        return [IngressUsage("other", [(UsageLine(now, "bob", "fake", ""), UsageTotals(1, compute_s=9.0))])]


async def test_admins_see_what_keys_have_used_in_all_ingresses():
    auth = AuthConfig(api_keys=tuple(key_line(name, f"sk-{name}") for name in ("alice", "root")), admin_keys=("root",))
    async with fake_api(says("hello"), auth=auth, prices=Prices(engine_hour=3600.0)) as api:
        await api.until_status()
        api.engine.cost = SequenceCost(2.0, 0.0, 0.0)
        api.telemetry.peers = OtherIngress()
        headers = {"authorization": "Bearer sk-alice"}
        await api.client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        assert (await api.client.get("/console/costs", headers=headers)).status_code == 403
        found = await api.client.get("/console/costs", headers={"authorization": "Bearer sk-root"})
        view = msgspec.json.decode(found.content, type=CostsView)
        assert [(row.name, row.used.compute_s) for row in view.by_key] == [("bob", 9.0), ("alice", 2.0)]
        assert view.by_model[0].used.cost == 2.0


async def test_an_ingress_counts_itself_once_among_all():
    telemetry = Telemetry("other", peers=OtherIngress())
    assert await telemetry.all_usage() == []


def test_what_an_ingress_tells_another_arrives_as_it_was():
    telemetry = Telemetry("i")
    telemetry.hourly.add("alice", "m", "tuned", UsageTotals(1, 2, 3, 4, 0.5, 0.25, 0.125, 1.0, 2.0))
    told = telemetry.own_usage()
    assert len(told.lines) == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=IngressUsage) == told


def test_costs_are_shown_in_the_currency_of_the_configuration():
    args = {"models": [{"name": "m", "model": "pocket"}], "ingress": {"currency": "EUR"}}
    assert AppConfig.parse(args).console_config().currency == "EUR"
