from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from deployments.frontend import admission
from deployments.frontend.admission import AdmissionLimits, window
from deployments.frontend.first_token import FirstTokenDeadline
from deployments.frontend.latency_forecast import LatencyForecast
from engine.errors import Overloaded
from engine.wire.token_delta import ErrorInfo
from tests.deployments.fake_api import FakeApi, fake_api, until

LIMITS = AdmissionLimits(max_num_seqs=16, num_engines=1, num_ingresses=1, max_waiting=100, max_waiting_tokens=1000)


def ask(api: FakeApi, user: str = "u", **body: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(api.post("completions", user=user, **{"prompt": "a", "max_tokens": 1, **body}))


async def test_engine_gets_what_it_can_run_and_a_few_more(api):
    status = await api.until_status()
    assert window([status], LIMITS) == 18
    assert window([status, status], LIMITS) == 36


async def test_engine_that_lacks_blocks_gets_a_few_more_than_it_runs(api):
    status = await api.until_status()
    stats = msgspec.structs.replace(status.stats, running=5, waiting=9, blocks_used=9, blocks_total=10)
    assert window([msgspec.structs.replace(status, stats=stats)], LIMITS) == 7


async def test_ingresses_share_the_engines(api):
    limits = AdmissionLimits(max_num_seqs=16, num_engines=1, num_ingresses=4, max_waiting=9, max_waiting_tokens=9)
    assert window([await api.until_status()], limits) == 5


async def test_more_than_fits_waits_here_and_not_in_the_engine():
    async with fake_api(max_num_seqs=8) as api:
        api.engine.paused.set()
        answers = [ask(api) for _ in range(20)]
        await until(lambda: (api.model.admission.num_running, api.model.admission.num_waiting) == (9, 11))
        await until(lambda: len(api.engine.added) == 9)
        assert (await api.client.get("/load")).json() == {"server_load": 20}
        api.engine.paused.clear()
        assert [(await answer).status_code for answer in answers] == [200] * 20
        await until(lambda: api.model.admission.num_running == 0)


async def test_full_queue_is_answered_with_429_and_the_time_after_which_to_come_back():
    async with fake_api(max_num_seqs=8, max_waiting=3) as api:
        api.engine.paused.set()
        answers = [ask(api) for _ in range(12)]
        await until(lambda: api.model.admission.num_waiting == 3)
        for path, body in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user"}]}),
        ):
            for stream in (True, False):
                refused = await api.post(path, user="u", stream=stream, **body)
                assert refused.status_code == 429, refused.text
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "overloaded"
        assert api.model.admission.stats.refused == 4
        await until(lambda: len(api.engine.added) == 9)
        api.engine.paused.clear()
        assert [(await answer).status_code for answer in answers] == [200] * 12


async def test_flood_of_one_client_leaves_room_for_another():
    async with fake_api(max_num_seqs=8, max_waiting=20) as api:
        api.engine.paused.set()
        flood = [ask(api, "flood") for _ in range(60)]
        await until(lambda: api.model.admission.num_waiting == 20)
        late = [ask(api, "late") for _ in range(5)]
        await until(lambda: api.model.admission.stats.refused == 31 + 5)
        api.engine.paused.clear()
        assert [(await answer).status_code for answer in late] == [200] * 5
        statuses = [(await answer).status_code for answer in flood]
        assert (statuses.count(200), statuses.count(429)) == (24, 36)


async def test_late_client_is_served_before_the_flood_that_waits():
    async with fake_api(max_num_seqs=1, max_waiting=50) as api:
        api.engine.paused.set()
        flood = [ask(api, "flood", max_tokens=2) for _ in range(30)]
        await until(lambda: api.model.admission.num_waiting == 28)
        late = ask(api, "late", max_tokens=1)
        await until(lambda: api.model.admission.num_waiting == 29)
        api.engine.paused.clear()
        assert (await late).status_code == 200
        assert [request.params.max_tokens for request in api.engine.added].index(1) <= 4
        assert {(await answer).status_code for answer in flood} == {200}


async def test_client_that_leaves_the_queue_takes_no_turn():
    async with fake_api(max_num_seqs=1) as api:
        api.engine.paused.set()
        answers = [ask(api) for _ in range(2)]
        await until(lambda: len(api.engine.added) == 2)
        answers.append(ask(api))
        await until(lambda: api.model.admission.num_waiting == 1)
        answers += [ask(api) for _ in range(3)]
        await until(lambda: api.model.admission.num_waiting == 4)
        for answer in answers[3:]:
            answer.cancel()
        await asyncio.gather(*answers[3:], return_exceptions=True)
        assert api.model.admission.num_waiting == 1
        api.engine.paused.clear()
        assert [(await answer).status_code for answer in answers[:3]] == [200] * 3
        assert len(api.engine.added) == 3


async def test_client_that_leaves_just_as_it_is_pushed_out_hurts_nobody():
    async with fake_api(max_num_seqs=1, max_waiting=2) as api:
        queue = api.model.admission

        async def wait(client: str) -> None:
            async with queue.enter("r", client, 1, 1, 10.0):
                pass

        async with queue.enter("r", "a", 1, 1, 10.0), queue.enter("r", "a", 1, 1, 10.0):
            waiting = [asyncio.create_task(wait("a")) for _ in range(2)]
            await until(lambda: queue.num_waiting == 2)
            waiting[1].cancel()
            late = asyncio.create_task(wait("b"))
            await until(lambda: late in asyncio.all_tasks() and queue.num_waiting == 2)
        await asyncio.gather(waiting[0], late)
        assert (queue.num_waiting, queue.num_running) == (0, 0)


async def test_deadline_of_the_request_counts_in_the_queue_too():
    async with fake_api(max_num_seqs=1) as api:
        api.engine.paused.set()
        running = [ask(api) for _ in range(2)]
        await until(lambda: len(api.engine.added) == 2)
        headers = {"X-Request-Timeout-Ms": "50"}
        late = await api.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert late.status_code == 408
        assert late.json()["error"]["type"] == "timeout_error"
        assert late.headers["x-should-retry"] == "false"
        api.engine.paused.clear()
        assert [(await answer).status_code for answer in running] == [200] * 2


@pytest.mark.parametrize(("header", "timeout_s"), [("1500", 1.5), ("999999999", 60.0), (None, 60.0)])
async def test_engine_learns_the_deadline_which_is_never_above_the_servers(header, timeout_s):
    async with fake_api(request_timeout_s=60.0) as api:
        headers = {} if header is None else {"X-Request-Timeout-Ms": header}
        await api.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert timeout_s - 1 < api.engine.added[0].timeout_s <= timeout_s


async def test_refusal_by_the_engine_says_when_to_come_back(api):
    api.engine.refusal = ErrorInfo.of(Overloaded("the queue is full"))
    for stream in (True, False):
        answer = await api.post("completions", prompt="a", stream=stream)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert api.model.admission.num_running == 0


async def test_window_follows_what_the_engines_report(monkeypatch):
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.01)
    async with fake_api(max_num_seqs=1, num_engines=3) as api:  # one of them, it turns out
        api.engine.paused.set()
        answers = [ask(api) for _ in range(5)]
        await until(lambda: len(api.engine.added) == 5)
        answers += [ask(api) for _ in range(2)]
        await until(lambda: api.model.admission._queue.window == 2)
        api.engine.paused.clear()
        assert [(await answer).status_code for answer in answers] == [200] * 7


async def calibrated(api: FakeApi) -> None:
    """Let the ingress learn how long requests of a few tokens take."""
    api.engine.costs = {"prompt_seconds_per_token": 0.001, "decode_seconds_per_step": 0.001}
    api.engine.paused.set()
    first = ask(api)
    await until(lambda: api.model.admission.forecast.prompt_token_s)
    api.engine.paused.clear()
    assert (await first).status_code == 200
    for _ in range(20):
        assert (await ask(api)).status_code == 200


async def ask_within(api: FakeApi, limit_ms: int, **headers: str) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 1, "user": "u"}
    return await api.client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": str(limit_ms), **headers})


async def test_a_request_whose_first_token_would_come_too_late_is_refused_and_told_when_it_would_come(monkeypatch):
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.01)
    async with fake_api() as api:
        await calibrated(api)
        api.engine.paused.set()
        ahead = ask(api, prompt=[5] * 400)
        await until(lambda: len(api.engine.added) == 22)
        late = await ask_within(api, 1)
        assert late.status_code == 429, late.text
        error, bound_ms = late.json()["error"], int(late.headers["x-slo-ttft-bound-ms"])
        assert (error["code"], error["param"]) == ("first_token_late", "x-slo-ttft-ms")
        assert error["message"].startswith("the first token must come within 1 ms, but only 90% of the requests")
        assert bound_ms > 1
        assert int(late.headers["retry-after"]) >= 1
        assert (api.model.admission.stats.refused_late, api.model.admission.stats.refused) == (1, 0)
        served = asyncio.create_task(ask_within(api, bound_ms + 60_000))
        await until(lambda: len(api.engine.added) == 23)
        api.engine.paused.clear()
        assert (await ahead).status_code == (await served).status_code == 200
        assert int((await served).headers["x-slo-ttft-bound-ms"]) > 0


async def test_engines_without_work_take_a_request_whatever_its_limit_is(monkeypatch):
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.01)
    async with fake_api() as api:
        await calibrated(api)
        answer = await ask_within(api, 60_000)
        assert answer.status_code == 200
        assert 50 < api.engine.added[-1].ttft_slo_s <= 60, "the engine's order of prompts follows it"
        assert (await ask(api)).status_code == 200
        assert api.engine.added[-1].ttft_slo_s is None
        answer = await ask_within(api, 1)
        assert answer.status_code == 200
        assert int(answer.headers["x-slo-ttft-bound-ms"]) > 0


async def test_a_request_that_would_begin_only_after_its_time_limit_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.01)
    async with fake_api() as api:
        await calibrated(api)
        api.engine.paused.set()
        ahead = ask(api, prompt=[5] * 400)
        await until(lambda: len(api.engine.added) == 22)
        body = {"prompt": "a", "user": "u"}
        late = await api.client.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "1"})
        assert (late.status_code, late.json()["error"]["code"]) == (429, "first_token_late")
        api.engine.paused.clear()
        assert (await ahead).status_code == 200


async def test_a_limit_of_the_first_token_must_be_a_number_of_milliseconds(api):
    body = {"prompt": "a", "max_tokens": 1}
    for given in ("0", "-1", "1.5", "soon", "9" * 16):
        answer = await api.client.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


async def test_prompts_count_as_ahead_until_their_first_token(api):
    queue, deadline = api.model.admission, FirstTokenDeadline()
    queue.forecast = LatencyForecast(num_prompt_engines=1, prompt_token_s=1.0)
    async with queue.enter("r", "a", 1, 7, 10.0, deadline) as queued:
        assert queue._expect(1, 0.0).first_token.expected_s == 8
        queue.charge(queued, 1)
        assert queue._expect(1, 0.0).first_token.expected_s == 1
    async with queue.enter("r", "a", 1, 7, 10.0, deadline):
        pass
    assert queue._expect(1, 0.0).first_token.expected_s == 1
    assert queue.stats.latency_ratios["first_token"]["no"].count == 1


async def test_what_engines_had_queued_before_the_ingress_was_idle_is_not_ahead_of_later_requests(monkeypatch):
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.01)
    async with fake_api() as api:
        api.engine.costs = {"prompt_seconds_per_token": 0.001, "queued_tokens": 500}
        api.engine.paused.set()
        first = ask(api)
        await until(lambda: api.model.admission.forecast.queued_tokens == 500)
        api.engine.paused.clear()
        assert (await first).status_code == 200
        await until(lambda: not api.model.admission.forecast.queued_tokens)
        assert api.model.admission.forecast.prompt_token_s == 0.001
