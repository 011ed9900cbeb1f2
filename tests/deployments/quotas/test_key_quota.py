"""Limits of API keys over HTTP."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from deployments.billing.bill import Bill, Used
from deployments.frontend.api_keys import key_line
from deployments.frontend.observers import RequestSize
from deployments.http.middleware import AuthConfig
from deployments.quotas import key_quota
from deployments.quotas import quotas as quotas_module
from deployments.quotas.errors import BudgetSpent, QuotaExceeded
from deployments.quotas.key_quota import KeyQuota, RequestQuota, record_key
from deployments.quotas.limits import BudgetLimit, KeyLimits, Limit, Shortage
from deployments.quotas.quotas import Quotas
from deployments.quotas.record import decode
from deployments.storage.config import StoreConfig, open_store
from deployments.storage.key_value import StoreUnavailable
from deployments.storage.memory import MemoryStore
from engine.wire.parts.costs import ReportCost, SequenceCost
from tests.deployments.fake_api import FakeApi, fake_api, says, until
from tests.deployments.real_api import real_api
from tests.models import make_model
from tests.scenarios import run

LINES = tuple(key_line(name, f"sk-{name}") for name in ("small", "other"))
NOON = 1_800_014_400.5
DAY = BudgetLimit(budget_duration="1d", max_budget=1_234_567.5)
ASKED: dict[str, Any] = {"model": "fake", "prompt": "hi there", "max_tokens": 4}


def at_once(then: Callable[[], None]) -> None:
    """All costs are known."""
    then()


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window ends during a test, and the machine may be busy."""
    real = KeyQuota.__init__

    def at_noon(self: KeyQuota, *args: Any, **more: Any) -> None:
        real(self, *args, **more | {"wall": lambda: NOON})

    monkeypatch.setattr(KeyQuota, "__init__", at_noon)
    monkeypatch.setattr(key_quota, "SYNC_TIMEOUT_S", 30.0)


def limited(**limits: Any) -> AuthConfig:
    return AuthConfig(api_keys=LINES, key_limits={"small": KeyLimits(**limits)})


def client(api: FakeApi, key: str = "small") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://fake/v1", api_key=f"sk-{key}", http_client=api.client, max_retries=0)


async def test_a_key_over_its_limit_is_told_which_limit_and_when_to_come_again_and_others_are_not_affected():
    async with fake_api(says("hello"), auth=limited(rpm_limit=2, tpm_limit=1000)) as api:
        for _ in range(2):
            answer = await client(api).completions.with_raw_response.create(**ASKED)
        found = answer.headers
        assert found["x-ratelimit-limit-requests"] == "2"
        assert found["x-ratelimit-remaining-requests"] == "0"
        assert found["x-ratelimit-reset-requests"] == "59.500s"
        assert 0 < int(found["x-ratelimit-remaining-tokens"]) < 1000
        with pytest.raises(openai.RateLimitError) as refused:
            await client(api).completions.create(**ASKED)
        assert refused.value.code == "rate_limit_exceeded" and refused.value.param == "rpm_limit/1m"
        assert "'small'" in refused.value.message and "2" in refused.value.message
        assert refused.value.response.headers["retry-after"] == "60"
        assert (await client(api).models.list()).data, "only what engines compute counts"
        other = await client(api, "other").completions.with_raw_response.create(**ASKED)
        assert not any(name.startswith("x-ratelimit") for name in other.headers)


@pytest.mark.parametrize(
    ("limits", "left", "need", "message"),
    [
        ({"tpm_limit": 200}, 30, 34, "has only 30 left of its tpm_limit/1m of 200, and this request would take 34;"),
        ({"tpm_limit": 3_000_000}, 1_234_567, 1_234_568, "1234567 left of its tpm_limit/1m of 3000000, .* 1234568;"),
        ({"tpm_limit": 200}, 0, 34, "has used up its tpm_limit/1m of 200; more is free in 60 s at the latest"),
        ({"rpm_limit": 2}, 0, 1, "has used up its rpm_limit/1m of 2; more is free in 60 s at the latest"),
        ({"max_parallel_requests": 2}, 0, 1, "has used up its max_parallel_requests of 2; more is free when one of"),
        ({"budget_limits": (DAY,)}, 0, 3, "has used up its max_budget/1d of 1234567.5; more is free in 43200 s"),
    ],
)  # fmt: skip
async def test_who_is_refused_is_told_what_is_left_and_what_the_request_would_take(limits, left, need, message):
    key = KeyQuota("small", KeyLimits(**limits), MemoryStore(2**20), "a", 1)
    (limit,) = KeyLimits(**limits).all()
    await key.take({limit.unit: limit.value - left})
    with pytest.raises(QuotaExceeded, match=message) as refused:
        await key.take({limit.unit: float(need)})
    assert refused.value.param == limit.name
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value), "ingresses pass it on"


async def test_an_ingress_without_the_store_says_that_only_its_part_is_used_up(monkeypatch):
    store = MemoryStore(2**20)
    key = KeyQuota("small", KeyLimits(tpm_limit=200), store, "a", 4)
    await key.sync()

    async def fails(*_: Any) -> Any:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(store, "get", fails)
    part = "of this ingress's part of its tpm_limit/1m of 200 (the store does not answer)"
    with pytest.raises(QuotaExceeded, match=re.escape(f"has only 50 left {part}, and this request would take 60; ")):
        await key.take({"tokens": 60.0})
    await key.take({"tokens": 50.0})
    with pytest.raises(QuotaExceeded, match=re.escape(f"has used up {part.removeprefix('of ')}; ")):
        await key.take({"tokens": 1.0})


def test_the_page_shows_the_message_as_it_is():
    limit = Limit("tpm_limit", "tokens", 200, "1m")
    page = Path("docs/quotas.md").read_text().replace("\n", " ")
    assert f"`{QuotaExceeded('alice', Shortage(limit, 30.0, 34.0), 6.0)}`" in page


async def test_anthropics_clients_get_anthropics_headers():
    async with fake_api(says("hello"), auth=limited(rpm_limit=1)) as api:
        body = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-api-key": "sk-small"}
        answer, refused = [await api.client.post("/v1/messages", json=body, headers=headers) for _ in range(2)]
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert answer.headers["anthropic-ratelimit-requests-reset"] == "2027-01-15T12:01:00Z"
        assert refused.status_code == 429 and refused.headers["retry-after"] == "60"
        assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_tokens_count_as_they_were_used_and_streams_are_refused_before_they_begin():
    async with fake_api(says("hello"), auth=limited(tpm_limit=60)) as api:
        usage = (await client(api).completions.create(**ASKED)).usage
        assert usage is not None
        raw = await client(api).completions.with_raw_response.create(**ASKED)
        # the second is only estimated, from the first, when its headers are sent; both are alike
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 60 - 2 * usage.total_tokens
        with pytest.raises(openai.RateLimitError) as refused:
            await client(api).completions.create(**{**ASKED, "prompt": "hi " * 15, "stream": True})
        assert refused.value.code == "rate_limit_exceeded"
        assert f"has only {60 - 2 * usage.total_tokens} left of its tpm_limit/1m of 60" in refused.value.message


async def test_only_so_many_requests_run_at_a_time_and_one_that_ends_or_is_left_makes_room():
    async with fake_api(says("hello"), auth=limited(max_parallel_requests=1)) as api:
        for ends in (True, False):
            api.engine.paused.set()
            before = len(api.engine.added)
            first = asyncio.create_task(client(api).completions.create(**ASKED))
            await until(lambda before=before: len(api.engine.added) > before)
            with pytest.raises(openai.RateLimitError) as refused:
                await client(api).completions.create(**ASKED)
            assert refused.value.param == "max_parallel_requests"
            if ends:
                api.engine.paused.clear()
                await first
            else:
                first.cancel()
                await asyncio.wait([first])
                api.engine.paused.clear()
            await client(api).completions.create(**ASKED)


async def test_an_embedding_of_many_inputs_is_one_request():
    async with fake_api(auth=limited(rpm_limit=1, max_parallel_requests=1)) as api:
        found = await client(api).embeddings.create(model="fake", input=["hi"] * 100)
        assert len(found.data) == 100
        with pytest.raises(openai.RateLimitError):
            await client(api).embeddings.create(model="fake", input="hi")


async def test_a_request_that_is_wrong_or_whose_answer_is_kept_counts_for_nothing():
    async with fake_api(says("hello"), auth=limited(rpm_limit=2)) as api:
        with pytest.raises(openai.BadRequestError):
            await client(api).completions.create(**{**ASKED, "max_tokens": -1})
        again = {"extra_headers": {"Idempotency-Key": "once"}}
        texts = {(await client(api).completions.create(**ASKED, **again)).id for _ in range(5)}
        assert len(texts) == 1
        await client(api).completions.create(**ASKED)
        with pytest.raises(openai.RateLimitError):
            await client(api).completions.create(**ASKED)


async def test_models_that_the_limits_leave_out_do_not_exist():
    async with fake_api(says("hello"), names=("fake", "large"), auth=limited(models=("fake",))) as api:
        await client(api).completions.create(**ASKED)
        with pytest.raises(openai.NotFoundError):
            await client(api).completions.create(**{**ASKED, "model": "large"})
        await client(api, "other").completions.create(**{**ASKED, "model": "large"})


async def test_a_key_has_a_priority_which_its_requests_may_only_lower():
    async with fake_api(says("hello"), auth=limited(priority=2), has_priorities=True) as api:
        for asked, key in ((0, "small"), (1, "small"), (3, "small"), (1, "other")):
            await client(api, key).completions.create(**ASKED, extra_body={"priority": asked})
        assert [request.priority for request in api.engine.added] == [2, 2, 3, 1]


async def test_several_ingresses_share_the_limits_by_their_store(tmp_path: Path):
    store, auth = StoreConfig(url=f"sqlite://{tmp_path}/store"), limited(rpm_limit=10)
    async with fake_api(says("hello"), auth=auth, store=store) as one, fake_api(
        says("hello"), auth=auth, store=store
    ) as two:  # fmt: skip
        answered = 0
        for i in range(24):
            try:
                await client((one, two)[i % 2]).completions.create(**ASKED)
                answered += 1
            except openai.RateLimitError:
                pass
        assert answered == 10
    async with fake_api(says("hello"), auth=auth, store=store) as third:
        with pytest.raises(openai.RateLimitError):
            await client(third).completions.create(**ASKED)


async def test_a_store_that_was_never_reached_is_told_apart_from_a_limit_that_is_used_up(tmp_path: Path):
    store = StoreConfig(url=f"unix://{tmp_path}/nobody")
    async with fake_api(says("hello"), auth=limited(rpm_limit=10), store=store) as api:
        with pytest.raises(openai.InternalServerError) as refused:
            await client(api).completions.create(**ASKED)
        assert refused.value.status_code == 503 and refused.value.code == "store_unavailable"
        await client(api, "other").completions.create(**ASKED)


async def test_nothing_is_written_any_more_when_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quotas_module, "RENEW_S", 0.01)
    async with fake_api(says("hello"), auth=limited(rpm_limit=100)) as api:
        for _ in range(5):
            await client(api).completions.create(**ASKED)
        await until(lambda: not any("_renew" in repr(task) for task in asyncio.all_tasks()))


async def test_what_a_request_uses_is_written_although_it_waited_long_before_it_was_charged(monkeypatch):
    """Seed 9 of tests.days: nobody wrote any more when it was charged."""
    monkeypatch.setattr(quotas_module, "RENEW_S", 0.01)
    store = open_store(StoreConfig())
    quotas = Quotas(store, {"small": KeyLimits(rpm_limit=9)})
    quota = quotas.of("small")
    await asyncio.sleep(0.05)  # as for its images
    async with quota.charged(RequestSize(5, 1, None), Bill(lambda: Used(True, 5, 1, 0.0, 0.0), at_once)):
        pass

    async def written() -> float:
        (window,) = decode(await store.get(record_key("small")) or b"").windows.values()
        return window.taken()

    async with asyncio.timeout(20):
        while await written() != 1.0:
            await asyncio.sleep(0.01)


class LateStore(MemoryStore):
    """Answers later, and is asked to write."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.writes, self.goes_on = 0, asyncio.Event()
        self.goes_on.set()

    async def get(self, key: str) -> bytes | None:
        for _ in range(9):  # others run meanwhile
            await asyncio.sleep(0)
        return await super().get(key)

    async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
        self.writes += 1
        await self.goes_on.wait()
        return await super().replace(key, expected, value, ttl_s)


async def test_what_a_request_uses_is_written_although_it_asked_while_what_was_used_before_was_written(monkeypatch):
    """Seed 33525038 of tests.days: nobody wrote any more when it ended."""
    monkeypatch.setattr(quotas_module, "RENEW_S", 0.01)
    store, size = LateStore(), RequestSize(5, 1, 20)
    quotas = Quotas(store, {"small": KeyLimits(tpm_limit=99)})
    bill = Bill(lambda: Used(True, 5, 1, 0.0, 0.0), at_once)

    async def request(ends: asyncio.Event) -> None:
        async with quotas.of("small").charged(size, bill):  # type: ignore[union-attr]
            await ends.wait()

    async def used() -> float:
        (window,) = decode(await store.get(record_key("small")) or b"").windows.values()
        return window.taken()

    async with asyncio.timeout(20):
        (ended := asyncio.Event()).set()
        await request(ended)
        store.goes_on.clear()
        writes = store.writes
        while store.writes == writes:  # until what it has used is written
            await asyncio.sleep(0.001)
        later = asyncio.create_task(request(ends := asyncio.Event()))
        await asyncio.sleep(0)
        store.goes_on.set()
        while await used() != 6.0 + 25.0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        ends.set()
        await later
        while await used() != 6.0 + 6.0:
            await asyncio.sleep(0.001)


async def test_a_budget_is_spent_by_what_requests_have_really_cost(tmp_path: Path):
    folder = make_model(tmp_path / "model", "llama", tokenizer=True)
    budget = BudgetLimit(budget_duration="1d", max_engine_seconds=1e-4)
    async with real_api(folder, auth=limited(budget_limits=(budget,))) as api:
        theirs = openai.AsyncOpenAI(base_url=f"{api.client.base_url}/v1", api_key="sk-small", max_retries=0)
        asked: Any = {"model": "tiny", "prompt": "The fox", "max_tokens": 8, "temperature": 0.0}
        stream = await theirs.completions.create(**asked, stream=True)
        assert [chunk async for chunk in stream], "what runs is not cut off"
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as refused:
                await theirs.completions.create(**asked)
        assert refused.value.code == "insufficient_quota"
        assert refused.value.param == "max_engine_seconds/1d"
        headers = refused.value.response.headers
        assert headers["x-should-retry"] == "false" and headers["retry-after"] == str(12 * 3600)


def test_a_key_whose_requests_cost_more_than_its_budget_runs_again_in_the_next_window(monkeypatch):
    budget = BudgetLimit(budget_duration="1m", max_budget=1.0)
    used = Used(True, 5, 500, 0.0, money=3.0)
    wall = NOON

    async def scenario() -> None:
        nonlocal wall
        key = KeyQuota("small", KeyLimits(budget_limits=(budget,)), open_store(StoreConfig()), "a", 1)
        monkeypatch.setattr(key, "_wall", lambda: wall)
        for _ in range(3):
            async with RequestQuota(key).charged(RequestSize(5, 1, None), Bill(lambda: used, at_once)):
                pass
            with pytest.raises(QuotaExceeded, match="has used up its max_budget/1m of 1"):
                await key.take(key.estimate(RequestSize(5, 1, None)))
            wall += 60

    run(scenario())


@pytest.mark.parametrize("is_written", [True, False])
def test_a_request_alone_runs_whatever_it_may_use_and_later_windows_pay_for_what_was_too_much(monkeypatch, is_written):
    wall = NOON

    async def scenario() -> None:
        nonlocal wall
        key = KeyQuota("small", KeyLimits(tpm_limit=100), open_store(StoreConfig()), "a", 1)
        monkeypatch.setattr(key, "_wall", lambda: wall)

        async def charge(max_tokens: int | None, output_tokens: int) -> None:
            bill = Bill(lambda: Used(True, 5, output_tokens, 0.0, 0.0), at_once)
            async with RequestQuota(key).charged(RequestSize(5, 1, max_tokens), bill):
                with pytest.raises(QuotaExceeded, match="has used up its tpm_limit/1m of 100"):
                    await key.take({"tokens": 96})

        await charge(None, 245)  # it does not say how much
        if is_written:
            await key.sync()
        for left in (0, 50, 100):
            wall += 60
            if left < 100:
                with pytest.raises(QuotaExceeded):
                    await key.take({"tokens": left + 1})
            if left:
                key.settle(await key.take({"tokens": left}), {})
            await key.sync()
        await charge(800, 5)  # of which it gives most back
        await charge(85, 85)

    run(scenario())


async def test_forty_requests_at_once_are_charged_with_all_that_they_may_use_and_give_back_the_rest():
    async with fake_api(lambda request: [5] * 400, auth=limited(tpm_limit=1000)) as api:
        for _ in range(3):
            await client(api).completions.create(**ASKED | {"max_tokens": 1})
        asked = ASKED | {"max_tokens": 200}
        answers = await asyncio.gather(
            *(client(api).completions.create(**asked) for _ in range(40)), return_exceptions=True
        )
        used = [answer.usage.total_tokens for answer in answers if isinstance(answer, openai.types.Completion)]  # type: ignore[union-attr]
        assert len(used) == 4 and sum(used) <= 1000
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert len(refused) == 36 and all(error.param == "tpm_limit/1m" for error in refused)
    async with fake_api(says("hello"), auth=limited(tpm_limit=1000)) as api:
        for _ in range(10):
            await client(api).completions.create(**ASKED | {"max_tokens": 400})


def test_where_requests_do_not_say_how_much_the_longest_of_many_answers_is_expected():
    key = KeyQuota("small", KeyLimits(tpm_limit=1000), open_store(StoreConfig()), "a", 1)
    size, said = RequestSize(10, 2, None, 300), RequestSize(10, 2, 400)
    assert key.estimate(RequestSize(10, 2, None))["tokens"] == 1000, "at most the whole limit"
    for output_tokens in range(key_quota.MEMORY):
        assert key.estimate(size)["tokens"] == 10 + 2 * 300, "the context, before enough is known"
        key.means.observe(size, Used(True, 10, 2 * output_tokens, 0.0, 0.0))
    assert key.estimate(size)["tokens"] == 10 + 2 * (key_quota.MEMORY - 1)
    assert key.estimate(said)["tokens"] == 10 + 2 * 400, "what is said counts, however short the answers were"
    assert key.estimate(RequestSize(10, 2, 0))["tokens"] == 10


@pytest.mark.parametrize("route", ["completions", "embeddings"])
async def test_a_prompt_that_no_minute_has_room_for_is_wrong_and_not_early(route):
    body = {"completions": {"prompt": "hi " * 100}, "embeddings": {"input": ["hi " * 50] * 2}}[route]
    async with fake_api(says("hello"), auth=limited(tpm_limit=60)) as api:
        headers = {"authorization": "Bearer sk-small"}
        refused = await api.client.post(f"/v1/{route}", json=body, headers=headers)
        error = refused.json()["error"]
        assert refused.status_code == 400 and "retry-after" not in refused.headers
        assert (error["code"], error["param"]) == ("prompt_exceeds_limit", "tpm_limit/1m")
        assert "a tpm_limit/1m of 60" in error["message"]
        assert not api.engine.added
        assert (await api.client.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200


@pytest.mark.parametrize("ends", [False, True])
async def test_only_a_key_that_asks_for_it_has_its_running_answers_ended_when_a_budget_is_gone(ends):
    budget = BudgetLimit(budget_duration="1d", max_engine_seconds=1.0)
    async with fake_api(auth=limited(budget_limits=(budget,), ends_running_requests=ends)) as api:
        api.engine.cost = SequenceCost(1.5, 0.0, 0.0)
        body = {"model": "fake", "prompt": "abcd", "max_tokens": 200}
        headers = {"authorization": "Bearer sk-small"}
        answer = await api.client.post("/v1/completions", json=body, headers=headers)
        assert (api.engine.added[0].record(ReportCost) is not None) is ends
        if not ends:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            return
        error = answer.json()["error"]
        assert answer.status_code == 402 and answer.headers["x-should-retry"] == "false"
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert error["param"] == "max_engine_seconds/1d" and "'small'" in error["message"]
        await until(lambda: api.engine.aborted)
        usage = api.telemetry.stats.model("fake").usage
        await until(lambda: "small" in usage)
        assert usage["small"].compute_s == 1.5, "what was computed is paid for"
        refused = await api.client.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 429


async def test_a_stream_that_a_budget_ends_keeps_its_text_and_then_has_the_error():
    budget = BudgetLimit(budget_duration="1d", max_engine_seconds=1.0)
    async with fake_api(auth=limited(budget_limits=(budget,), ends_running_requests=True)) as api:
        headers = {"x-api-key": "sk-small"}
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "fake", "messages": messages, "max_tokens": 100, "stream": True}
        api.engine.paused.set()
        asked = asyncio.create_task(api.client.post("/v1/messages", json=body, headers=headers))
        await until(lambda: api.engine.num_live)
        api.engine.cost = SequenceCost(0.5, 0.0, 0.0)
        api.engine.paused.clear()
        await until(lambda: api.telemetry.timelines.newest(1)[0].output_tokens)
        api.engine.cost = SequenceCost(1.5, 0.0, 0.0)
        answer = await asked
        assert "content_block_delta" in answer.text and '"type":"billing_error"' in answer.text
        assert "message_stop" not in answer.text


def test_a_running_request_is_charged_as_it_grows_and_the_rest_at_its_end():
    budget = BudgetLimit(budget_duration="1d", max_budget=10.0)
    limits = KeyLimits(budget_limits=(budget,), ends_running_requests=True)
    spent = 0.0

    async def scenario() -> None:
        nonlocal spent
        key = KeyQuota("small", limits, open_store(StoreConfig()), "a", 1)
        bill = Bill(lambda: Used(True, 5, 5, 0.0, spent), at_once)
        (limit,) = limits.all()
        watch = RequestQuota(key).observer(RequestSize(5, 1, None), bill)
        async with watch.running():
            for spent in (2.0, 4.0, 4.0, 9.0):
                await watch.taking(1)
                assert key.shared.remaining(limit) == pytest.approx(10.0 - spent)
            spent = 12.0
            with pytest.raises(BudgetSpent, match="has used up its max_budget/1d of 10"):
                await watch.taking(1)
            spent = 13.0
        await key.sync()
        (used,) = decode(await key._store.get(record_key("small")) or b"").windows.values()
        assert used.taken() == pytest.approx(13.0)

    run(scenario())


def shared_keys(limits: KeyLimits, names: str) -> list[KeyQuota]:
    """The same key in several ingresses, whose clock runs."""
    store, began = open_store(StoreConfig()), time.monotonic()
    keys = [KeyQuota("small", limits, store, name, len(names)) for name in names]
    for key in keys:
        key._wall = lambda: NOON + min(50.0, time.monotonic() - began)
    return keys


async def test_one_place_serves_requests_that_come_through_one_ingress_after_the_other():
    keys = shared_keys(KeyLimits(max_parallel_requests=1), "abc")
    for i in range(30):
        bill = Bill(lambda: Used(True, 5, 1, 0.0, 0.0), at_once)
        async with RequestQuota(keys[i % 3]).charged(RequestSize(5, 1, None), bill):
            if i == 10:  # it really is taken
                with pytest.raises(QuotaExceeded, match="max_parallel_requests of 1"):
                    await keys[0].take_place()


async def test_a_request_waits_for_a_place_until_the_ingress_that_has_it_writes_the_next_time(monkeypatch):
    monkeypatch.setattr(key_quota, "PLACE_WAIT_S", 60.0)
    one, two = shared_keys(KeyLimits(max_parallel_requests=1), "ab")
    place = await one.take_place()
    waiting = asyncio.create_task(two.take_place())
    await until(lambda: two.shared.others_have_places)
    one.settle(place, {})
    assert not waiting.done()
    await one.sync()
    await waiting


async def test_a_request_does_not_wait_for_a_place_that_its_own_ingress_has(monkeypatch):
    monkeypatch.setattr(key_quota, "PLACE_WAIT_S", 60.0)
    key = KeyQuota("small", KeyLimits(max_parallel_requests=1), open_store(StoreConfig()), "a", 2)
    await key.take_place()
    with pytest.raises(QuotaExceeded):
        await asyncio.wait_for(key.take_place(), 30.0)


async def test_a_request_whose_client_leaves_while_it_asks_is_charged_with_nothing():
    store = SlowStore()
    key = KeyQuota("small", KeyLimits(rpm_limit=10, max_parallel_requests=1), store, "a", 2)
    store.answers.clear()
    first, left = (asyncio.create_task(key.take({"requests": 1.0})) for _ in range(2))
    await until(lambda: store.ttl_s)  # both are written, and the answer is on the way
    left.cancel()
    await asyncio.wait([left])
    store.answers.set()
    charge = await first
    await key.sync()
    assert decode(await store.get(record_key("small")) or b"").windows["rpm_limit/1m"].taken() == 1
    key.settle(charge, {})
    await key.sync()
    assert key.shared.is_settled


class SlowStore(MemoryStore):
    """A store whose answers can be held back."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.answers, self.ttl_s = asyncio.Event(), 0.0
        self.answers.set()

    async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
        self.ttl_s = ttl_s
        replaced = await super().replace(key, expected, value, ttl_s)
        await self.answers.wait()
        return replaced


async def test_the_first_request_of_a_key_waits_for_a_store_that_is_busy_and_later_ones_do_not(monkeypatch):
    monkeypatch.setattr(key_quota, "SYNC_TIMEOUT_S", 0.01)
    store = SlowStore()
    store.answers.clear()
    key = KeyQuota("small", KeyLimits(rpm_limit=10), store, "a", 1)
    first = asyncio.create_task(key.take({"requests": 1.0}))
    done, _ = await asyncio.wait([first], timeout=0.05)
    assert not done
    store.answers.set()
    assert (await first).amounts == {"rpm_limit/1m": 1.0}
    store.answers.clear()
    for _ in range(9):
        await key.take({"requests": 1.0})  # by itself, after 0.01 s


async def test_a_place_that_comes_free_while_another_is_given_back_is_given_back_too():
    store = SlowStore()
    one = KeyQuota("small", KeyLimits(max_parallel_requests=2), store, "a", 2)
    places = [await one.take_place() for _ in range(2)]
    store.answers.clear()
    num_proposals = one._num_proposals
    one.leave_place(places[0])
    await until(lambda: one._num_proposals > num_proposals)  # it is written, and the answer is on the way
    one.leave_place(places[1])
    store.answers.set()
    assert one._giving_back is not None
    await one._giving_back
    assert decode(await store.get(record_key("small")) or b"").windows["max_parallel_requests"].taken() == 0


async def test_only_so_many_requests_wait_for_a_place(monkeypatch):
    monkeypatch.setattr(key_quota, "PLACE_WAIT_S", 60.0)
    monkeypatch.setattr(key_quota, "MAX_WAITING", 2)
    one, two = shared_keys(KeyLimits(max_parallel_requests=2), "ab")
    for _ in range(2):
        await one.take_place()
    waiting = [asyncio.create_task(two.take_place()) for _ in range(2)]
    await until(lambda: two._num_waiting == 2)
    with pytest.raises(QuotaExceeded):
        await two.take_place()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert two._num_waiting == 0


async def test_an_ingress_that_others_were_always_ahead_of_asks_again_at_once():
    class BusyStore(SlowStore):
        busy = True

        async def replace(self, key: str, expected: bytes | None, value: bytes, ttl_s: float) -> bool:
            return not (self.busy and expected) and await super().replace(key, expected, value, ttl_s)

    store = BusyStore()
    one, two = (KeyQuota("small", KeyLimits(rpm_limit=5), store, name, 2) for name in "ab")
    assert await one.sync()
    assert not await two.sync()
    store.busy = False
    assert await two.sync()


async def test_the_store_has_a_budget_until_its_time_ends():
    store, budget = SlowStore(), BudgetLimit(budget_duration="1176mo", max_engine_seconds=1.0)
    await KeyQuota("small", KeyLimits(budget_limits=(budget,)), store, "a", 1).sync()
    assert NOON + store.ttl_s == 2_777_068_800.0  # the end of 2057


async def test_a_request_that_another_ingress_had_admitted_is_not_refused_and_pays_for_its_answer_only():
    limits = KeyLimits(rpm_limit=1, tpm_limit=100, max_parallel_requests=1)
    key = KeyQuota("small", limits, open_store(StoreConfig()), "a", 1)
    bill = Bill(lambda: Used(True, 60, 7, 0.0, 0.0), at_once)
    first, again = RequestSize(60, 1, None), RequestSize(60, 1, None, resumes=True)
    async with RequestQuota(key).charged(first, bill), RequestQuota(key).charged(again, bill):
        pass
    left = {limit.unit: key.shared.remaining(limit) for limit in limits.all()}
    assert left == {"requests": 0, "tokens": pytest.approx(100 - 67 - 7), "parallel": 1}
