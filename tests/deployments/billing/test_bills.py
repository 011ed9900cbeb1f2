"""Who pays for what, over HTTP and a fake engine that tells what requests have cost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from deployments.billing.bill import Bill, Used, cost_headers
from deployments.billing.prices import Prices
from deployments.billing.totals import UsageTotals
from deployments.frontend import generation, inboxes
from deployments.frontend.api_keys import key_line
from deployments.frontend.costs.late_deltas import LateDeltas
from deployments.frontend.inboxes import Inboxes
from deployments.frontend.sequence import RequestUsage
from deployments.http.middleware import AuthConfig
from deployments.jobs.lease import lease_key
from deployments.jobs.record import job_id_of
from deployments.observability.stats import IngressStats
from deployments.openai.batches.config import BatchConfig
from deployments.openai.response_bodies import CostFields
from deployments.openai.responses.response_body import LIVE
from deployments.quotas import key_quota, record
from deployments.quotas.limits import BudgetLimit, KeyLimits
from deployments.storage.config import StoreConfig, open_store
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import ReportCost, SequenceCost
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import ErrorInfo, TokenBatch, TokenDelta
from tests.deployments.fake_api import FakeApi, fake_api, says, until
from tests.deployments.openai.batches.batches import client_of, ended, jsonl, line, start

KEY = {"authorization": "Bearer sk-alice"}
ALICE = (key_line("alice", "sk-alice"),)
COST = SequenceCost(compute_s=2.0, wasted_s=0.5, kv_gib_s=3.0, tier_gib_s=1.0)
PRICES = Prices(engine_hour=3600.0)
ASKED: dict[str, Any] = {"prompt": "abcd", "max_tokens": 40}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
ROUTES: dict[str, dict[str, Any]] = {
    "completions": ASKED,
    "chat/completions": CHAT,
    "messages": {**CHAT, "model": "fake"},
    "responses": {"input": "hello", "max_output_tokens": 20},
    "embeddings": {"input": ["hello", "world"]},
    "score": {"queries": "hello", "documents": ["world", "sea"]},
    "rerank": {"query": "hello", "documents": ["world", "sea"]},
}
STREAMS = ("completions", "chat/completions", "messages", "responses")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    real = key_quota.KeyQuota.__init__  # no window ends during a test
    monkeypatch.setattr(key_quota.KeyQuota, "__init__", lambda *args, wall: real(*args, wall=lambda: 1_800_014_400.5))
    monkeypatch.setattr(key_quota, "SYNC_TIMEOUT_S", 30.0)
    monkeypatch.setattr(inboxes, "LAST_DELTA_S", 60.0)
    monkeypatch.setattr(inboxes, "CLOSE_S", 60.0)


def limited(**limits: Any) -> AuthConfig:
    return AuthConfig(api_keys=ALICE, key_limits={"alice": KeyLimits(**limits)})


def used_by(api: FakeApi, key: str = "alice") -> UsageTotals:
    return api.telemetry.stats.model("fake").usage.get(key, UsageTotals())


async def begin(api: FakeApi, **body: Any) -> asyncio.Task[Any]:
    """Ask for an answer that an engine begins and does not end."""
    api.engine.paused.set()
    request = asyncio.create_task(api.client.post("/v1/completions", json={**ASKED, **body}, headers=KEY))
    await until(lambda: api.engine.num_live)
    return request


async def test_a_client_that_leaves_pays_for_what_was_computed_although_it_asked_for_no_costs():
    async with fake_api(auth=AuthConfig(api_keys=ALICE), prices=PRICES) as api:
        api.engine.cost = COST
        request = await begin(api)
        request.cancel()
        await until(lambda: used_by(api).sequences)
        assert used_by(api) == UsageTotals(1, 4, 0, 0, 2.0, 0.5, 3.0, 2.0, 1.0)
        (line,) = api.telemetry.hourly.lines.items()
        assert (line[0].key, line[0].model, line[1]) == ("alice", "fake", used_by(api))
        assert api.engine.added[0].record(ReportCost) is None


async def test_a_budget_is_spent_by_answers_that_their_clients_have_left():
    budget = BudgetLimit(budget_duration="1d", max_engine_seconds=1.5)
    async with fake_api(auth=limited(budget_limits=(budget,))) as api:
        api.engine.cost = COST
        request = await begin(api)
        request.cancel()
        api.engine.paused.clear()
        await until(lambda: used_by(api).sequences)
        refused = await api.client.post("/v1/completions", json=ASKED, headers=KEY)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "insufficient_quota"


async def test_an_answer_that_ends_at_a_stop_string_costs_what_its_engine_tells_after_the_answer():
    async with fake_api(says("hello world"), auth=AuthConfig(api_keys=ALICE)) as api:
        api.engine.cost = COST
        body = {**ASKED, "stop": [" w"]}
        answer = await api.client.post("/v1/completions", json=body, headers=KEY)
        assert answer.json()["choices"][0]["text"] == "hello"
        await until(lambda: used_by(api).sequences)
        assert used_by(api).compute_s == 2.0 and used_by(api).output_tokens > 0
        (timeline,) = (await api.client.get(f"/debug/requests/{answer.json()['id']}", headers=KEY)).json()["sequences"]
        assert [cost["kv_gib_s"] for cost in timeline["costs"].values()] == [3.0]


async def test_a_client_that_leaves_before_it_has_read_the_end_pays_at_once(api):
    api.engine.cost = COST
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    asked = GenerateRequest(
        request_id="r", prompt=[5, 6], params=params, reply_to=api.channel.address, client="key:alice"
    )
    chunks = generation.LiveGeneration(api.model.frontend, [[asked]], "key:alice").chunks()
    await anext(chunks)
    inbox = api.channel._inboxes["r"]
    await until(lambda: "r" in inbox.last)
    await chunks.aclose()
    assert used_by(api).compute_s == 2.0, "its engine will tell nothing more"


async def test_a_request_that_fails_while_it_runs_is_paid_for(monkeypatch):
    monkeypatch.setattr(generation, "TIMEOUT_GRACE_S", 0.0)
    async with fake_api(auth=AuthConfig(api_keys=ALICE)) as api:
        api.engine.cost = COST
        api.engine.paused.set()
        failed = await api.client.post("/v1/completions", json=ASKED, headers=KEY | {"X-Request-Timeout-Ms": "50"})
        assert failed.status_code == 408
        await until(lambda: used_by(api).sequences)
        assert used_by(api).compute_s == 2.0


async def test_a_request_that_was_never_admitted_is_not_counted():
    async with fake_api(auth=AuthConfig(api_keys=ALICE), max_num_seqs=1) as api:
        requests = [await begin(api) for _ in range(8)]
        await until(lambda: api.model.admission.num_waiting)
        late = await api.client.post("/v1/completions", json=ASKED, headers=KEY | {"X-Request-Timeout-Ms": "20"})
        assert late.status_code == 408 and not used_by(api).sequences
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)


async def test_what_clients_had_left_when_an_ingress_ends_is_counted():
    async with fake_api(auth=AuthConfig(api_keys=ALICE)) as api:
        api.engine.cost = COST
        request = await begin(api)
        request.cancel()
        await asyncio.wait([request])
    ((line, used),) = api.telemetry.hourly.lines.items()
    assert (line.key, used.compute_s, used.wasted_s) == ("alice", 2.0, 0.5)
    assert (used.kv_gib_s, used.tier_gib_s) == (3.0, 1.0)


def test_what_tiers_have_kept_for_holds_is_told_and_paid_if_there_is_any():
    usage = RequestUsage(
        costs={"a": SequenceCost(3.0, 0.0, 0.0, 7200.0)}, prices=Prices(engine_hour=1200.0, tier_gib_hour=0.5)
    )
    told = CostFields.of(usage, asked=True)
    assert told.cost == pytest.approx(1.0 + 1.0)
    assert msgspec.to_builtins(told.details)["tier_gib_seconds"] == 7200.0
    without = CostFields.of(RequestUsage(costs={"a": SequenceCost(3.0, 0.0, 0.0)}), asked=True)
    assert "tier_gib_seconds" not in msgspec.to_builtins(without.details)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_client_that_asks_is_told_the_cost_on_every_route(route):
    async with fake_api(says("hello"), prices=PRICES) as api:
        api.engine.cost = COST
        body = ROUTES[route]
        silent = (await api.post(route, **body)).json()["usage"]
        assert "cost" not in silent and "cost_details" not in silent
        answer = await api.post(route, **body, usage={"include": True})
        sequences = api.telemetry.timelines.newest(100)
        usage, count = answer.json()["usage"], len([s for s in sequences if s.answer_id == answer.json()["id"]])
        if route in ("embeddings", "score", "rerank"):
            count = len(api.engine.added) // 2
        assert usage["cost"] == pytest.approx(2.0 * count)
        details = {"compute_seconds": 2.0 * count, "kv_gib_seconds": 3.0 * count, "wasted_seconds": 0.5 * count}
        details["tier_gib_seconds"] = count
        assert usage["cost_details"] == pytest.approx(details)
        assert float(answer.headers["x-litellm-response-cost"]) == pytest.approx(2.0 * count)
        assert float(answer.headers["x-manta-compute-seconds"]) == pytest.approx(2.0 * count)
        if route in STREAMS:
            stream = await api.post(route, **body, usage={"include": True}, stream=True)
            assert stream.text.count('"cost":2.0') == 1 and "x-manta-compute-seconds" not in stream.headers


async def test_a_background_response_has_its_cost():
    async with fake_api(says("hello")) as api:
        api.engine.cost = COST
        body = {**ROUTES["responses"], "background": True, "usage": {"include": True}}
        began = (await api.post("responses", **body)).json()
        while (found := (await api.client.get(f"/v1/responses/{began['id']}")).json())["status"] in LIVE:
            await asyncio.sleep(0.005)
        assert found["usage"]["cost_details"]["compute_seconds"] == 2.0 and "cost" not in found["usage"]


async def test_an_ingress_that_takes_over_a_job_neither_refuses_it_nor_charges_its_prompt_again(tmp_path):
    store = StoreConfig(url=f"sqlite://{tmp_path}/store")
    auth, headers = limited(rpm_limit=1, tpm_limit=44), KEY | {"Idempotency-Key": "once"}

    async def ask(api: FakeApi) -> Any:
        return await api.client.post("/v1/completions", json=ASKED, headers=headers)

    async def charged() -> dict[str, float]:
        values = open_store(store)
        stored = await values.get(key_quota.record_key("alice"))
        await values.close()
        assert stored is not None
        return {name: window.taken("nobody") for name, window in record.decode(stored).windows.items()}

    async with fake_api(auth=auth, store=store) as first:
        first.engine.cost = COST
        first.engine.paused.set()
        begun = asyncio.create_task(ask(first))
        await until(lambda: first.engine.num_live)
    await asyncio.gather(begun, return_exceptions=True)
    assert used_by(first) == UsageTotals(wasted_s=2.5), "what is computed again is not the client's"
    assert await charged() == {"rpm_limit/1m": 1.0, "tpm_limit/1m": 4.0}
    async with fake_api(auth=auth, store=store) as second:
        second.engine.cost = COST
        assert (await ask(second)).status_code == 200
        await until(lambda: used_by(second).sequences)
        assert used_by(second) == UsageTotals(1, 4, 0, 40, 2.0, 0.5, 3.0, 0.0, 1.0)
    assert await charged() == {"rpm_limit/1m": 1.0, "tpm_limit/1m": 44.0}


@pytest.mark.parametrize("cancelled", [True, False], ids=["client cancels it elsewhere", "another ingress takes it"])
async def test_a_job_that_is_taken_away_is_billed_only_if_nobody_else_computes_it(tmp_path, monkeypatch, cancelled):
    monkeypatch.setattr("deployments.jobs.lease.RENEW_S", 0.01)
    store, auth = StoreConfig(url=f"sqlite://{tmp_path}/store"), AuthConfig(api_keys=ALICE)
    async with fake_api(auth=auth, store=store) as one, fake_api(auth=auth, store=store) as two:
        one.engine.cost = COST
        one.engine.paused.set()
        if cancelled:
            body = {"input": "hello", "background": True}
            began = (await one.client.post("/v1/responses", json=body, headers=KEY)).json()
            await until(lambda: one.engine.num_live)
            await two.client.post(f"/v1/responses/{began['id']}/cancel", headers=KEY)
        else:
            headers = KEY | {"Idempotency-Key": "once"}
            asked = asyncio.create_task(one.client.post("/v1/completions", json=ASKED, headers=headers))
            await until(lambda: one.engine.num_live)
            values = open_store(store)
            await values.set(lease_key(job_id_of("alice", "once")), b"another", 60.0)
            await values.close()
            assert (await asked).json()["error"]["code"] == "lease_lost"
        await until(lambda: used_by(one).wasted_s)
        assert used_by(one).compute_s == (2.0 if cancelled else 0.0)
        assert used_by(one).sequences == int(cancelled)


async def test_a_key_that_is_sent_again_after_its_answer_has_failed_is_charged_as_a_new_request():
    async with fake_api(auth=limited(rpm_limit=2), prices=PRICES) as api:
        headers = KEY | {"Idempotency-Key": "once"}
        asked = asyncio.create_task(api.client.post("/v1/completions", json=ASKED, headers=headers))
        await until(lambda: any(sequence.output_tokens for sequence in api.telemetry.timelines.newest(1)))
        api.engine.failure = ErrorInfo("engine_error", "broken", 500, retryable=False, type="internal_error")
        assert (await asked).status_code == 500
        api.engine.failure = None
        assert (await api.client.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200
        assert (await api.client.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200, "kept"
        assert (await api.client.post("/v1/completions", json=ASKED, headers=KEY)).status_code == 429


async def test_an_answer_that_is_kept_tells_what_all_of_its_attempts_have_cost(monkeypatch):
    monkeypatch.setattr("deployments.frontend.retry.BACK_OFF_S", 0.01)
    async with fake_api(auth=AuthConfig(api_keys=ALICE), max_replays=1000) as api:
        api.engine.cost = COST
        api.engine.refusal = ErrorInfo("engine_unavailable", "gone", 503, retryable=True, type="internal_error")
        body, headers = {**ASKED, "usage": {"include": True}}, KEY | {"Idempotency-Key": "once"}
        asked = asyncio.create_task(api.client.post("/v1/completions", json=body, headers=headers))
        replays = api.telemetry.stats.model("fake").replays
        await until(lambda: replays["engine_unavailable"])
        api.engine.refusal = None
        first = (await asked).json()["usage"]["cost_details"]
        assert first["compute_seconds"] == 2.0 * (1 + replays["engine_unavailable"])
        again = await api.client.post("/v1/completions", json=body, headers=headers)
        assert again.json()["usage"]["cost_details"] == first
        await until(lambda: used_by(api).sequences)
        assert used_by(api).compute_s == first["compute_seconds"]


async def test_a_batch_that_another_ingress_goes_on_with_is_paid_for_once(tmp_path):
    lines = jsonl(line("a", prompt="abcd", max_tokens=8))
    folder, auth = BatchConfig(folder=str(tmp_path / "batches")), limited(tpm_limit=1000)
    store = StoreConfig(url=f"sqlite://{tmp_path}/store")
    async with fake_api(auth=auth, batches=folder, store=store) as first:
        first.engine.cost = COST
        first.engine.paused.set()
        batch = await start(client_of(first, "sk-alice"), lines)
        await until(lambda: first.engine.num_live)
    assert used_by(first) == UsageTotals(wasted_s=2.5)
    async with fake_api(auth=auth, batches=folder, store=store) as second:
        second.engine.cost = COST
        assert (await ended(client_of(second, "sk-alice"), batch.id)).status == "completed"
        await until(lambda: used_by(second).sequences)
        assert used_by(second) == UsageTotals(1, 4, 0, 8, 2.0, 0.5, 3.0, 0.0, 1.0)
    values = open_store(store)
    stored = await values.get(key_quota.record_key("alice"))
    await values.close()
    assert stored is not None
    assert [window.taken("nobody") for window in record.decode(stored).windows.values()] == [12.0]


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/embeddings"])
async def test_lines_of_a_batch_that_is_taken_away_are_paid_for_where_they_are_computed_again(
    endpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("deployments.jobs.lease.RENEW_S", 0.01)
    asked = {"prompt": "abcd", "max_tokens": 8} if endpoint == "/v1/completions" else {"input": "abcd"}
    lines = jsonl(line("a", url=endpoint, **asked))
    folder, auth = BatchConfig(folder=str(tmp_path / "batches")), AuthConfig(api_keys=ALICE)
    async with fake_api(auth=auth, batches=folder, store=StoreConfig(url=f"sqlite://{tmp_path}/store")) as api:
        api.engine.cost = COST
        api.engine.paused.set()
        batch = await start(client_of(api, "sk-alice"), lines, endpoint)
        await until(lambda: api.engine.num_live)
        values = open_store(StoreConfig(url=f"sqlite://{tmp_path}/store"))
        await values.set(lease_key(batch.id), b"another", 60.0)
        await values.close()
        await until(lambda: used_by(api).wasted_s)
        assert used_by(api) == UsageTotals(wasted_s=2.5)


async def test_a_job_that_its_client_cancels_is_paid_for():
    async with fake_api(auth=AuthConfig(api_keys=ALICE)) as api:
        api.engine.cost = COST
        api.engine.paused.set()
        body = {"input": "hello", "background": True}
        began = (await api.client.post("/v1/responses", json=body, headers=KEY)).json()
        await until(lambda: api.engine.num_live)
        await api.client.post(f"/v1/responses/{began['id']}/cancel", headers=KEY)
        await until(lambda: used_by(api).sequences)
        assert used_by(api).compute_s == 2.0


def delta(request_id: str, reason: Any = None) -> TokenBatch:
    last = TokenDelta(request_id=request_id, finish_reason=reason)
    return TokenBatch(engine_id="e", commands_to="tcp://e", step=1, deltas=[last])


async def test_the_last_delta_of_an_aborted_request_is_taken_once_and_awaited_for_a_while_only(monkeypatch):
    monkeypatch.setattr(inboxes, "LAST_DELTA_S", 0.01)
    channel, taken = Inboxes(IngressStats("i")), list[TokenDelta | None]()
    channel.take_last("a", taken.append)
    channel.take_last("b", taken.append)
    channel.dispatch(delta("a"))
    assert taken == [], "only the last one has the cost"
    channel.dispatch(delta("a", "abort"))
    channel.dispatch(delta("a", "abort"))
    assert [last and last.request_id for last in taken] == ["a"]
    await channel.all_ended()
    assert taken[1:] == [None]


async def test_an_ingress_that_ends_gives_up_what_its_engines_do_not_tell(monkeypatch):
    monkeypatch.setattr(inboxes, "CLOSE_S", 0.01)
    channel, taken = Inboxes(IngressStats("i")), list[TokenDelta | None]()
    channel.take_last("a", taken.append)
    await channel.all_ended()
    assert taken == [None]


def test_a_bill_is_settled_once_all_of_it_is_known_and_headers_have_nothing_before():
    late, settled = LateDeltas(), list[str]()
    bill = Bill(lambda: Used(True, 1, 1, 0.5, 0.25), late.when_none)
    late.expect()
    late.expect()

    def then() -> None:
        settled.append("settled")

    bill.when_known(then)
    late.came()
    assert settled == [] and cost_headers([bill]) == {}
    late.came()
    bill.when_known(then)
    assert settled == ["settled", "settled"]
    bill.total = bill.used()
    assert cost_headers([bill, bill]) == {"x-manta-compute-seconds": "1", "x-litellm-response-cost": "0.5"}
    assert cost_headers([bill, Bill(bill.used, late.when_none)]) == {} == cost_headers([])
