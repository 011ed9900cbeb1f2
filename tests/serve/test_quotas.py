"""Limits of API keys on a real cluster with three ingresses behind HAProxy, as OpenAI's client meets them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from deployments.frontend.api_keys import key_line
from deployments.quotas.key_quota import record_key
from deployments.quotas.record import decode
from deployments.storage.redis import RedisStore
from tests.redis_server import redis_server
from tests.serve.serve_run import wait_until
from tests.serve.test_idempotency import INGRESS, Serving, kill

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(1200)]
MINUTE, PARALLEL, BATCH, BACKGROUND, KILLED = 30, 3, 8, 2, 40
BUDGET_S = 0.5
LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "minute": {"rpm_limit": MINUTE},
    "parallel": {"max_parallel_requests": PARALLEL},
    "single": {"max_parallel_requests": 1},
    "budget": {"budget_limits": [{"budget_duration": "1mo", "max_engine_seconds": BUDGET_S}]},
    "batch": {"rpm_limit": BATCH},
    "background": {"rpm_limit": BACKGROUND},
    "killed": {"rpm_limit": KILLED},
}
CLIENTS = 12
GONE = (openai.APIConnectionError, openai.InternalServerError)  # what clients of a dead ingress see


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[Serving]:
    with redis_server() as redis:
        keys = [key_line(name, f"sk-{name}") for name in LIMITS]
        limits = {name: limit for name, limit in LIMITS.items() if limit}
        folder = tmp_path_factory.mktemp("serve")
        serving = Serving(folder, "sk-free", num_replicas=3, store=redis.url, api_keys=keys, key_limits=limits)
        try:
            serving.start()
            yield serving
        finally:
            serving.stop()


def client(serving: Serving, key: str, max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key=f"sk-{key}", timeout=120, max_retries=max_retries)


def complete(serving: Serving, key: str, **options: Any) -> str:
    """Return "ok", the code of the refusal, or "gone" if the ingress died."""
    with client(serving, key) as openai_client:
        try:
            openai_client.completions.create(**{"model": "pocket", "prompt": "Hi", "max_tokens": 1, **options})
        except openai.RateLimitError as error:
            return str(error.code) if float(error.response.headers["retry-after"]) > 0 else "no retry-after"
        except GONE:
            return "gone"
        return "ok"


def many(serving: Serving, key: str, count: int) -> Counter[str]:
    """What became of requests that come at the same time."""
    with ThreadPoolExecutor(CLIENTS) as threads:
        return Counter(threads.map(lambda _: complete(serving, key), range(count)))


def within_a_minute(trial: Callable[[], None]) -> None:
    """Try until the whole trial was in one minute of the clock."""
    for _ in range(3):
        while time.time() % 60 > 15:
            time.sleep(0.2)
        minute = time.time() // 60
        trial()
        if time.time() // 60 == minute:
            return
    pytest.fail("this machine was too slow")


def holders(redis_url: str, key: str) -> set[str]:
    """The ingresses that have had requests of a key."""

    async def get() -> bytes | None:
        store = RedisStore(redis_url)
        try:
            return await store.get(record_key(key))
        finally:
            await store.close()

    record = asyncio.run(get())
    return set() if record is None else set(decode(record).leases)


def test_in_one_minute_as_many_requests_pass_as_the_limit_says_through_all_ingresses_together(serving):
    passed: list[int] = []

    def trial() -> None:
        found = many(serving, "minute", 2 * MINUTE)
        assert set(found) == {"ok", "rate_limit_exceeded"}
        deadline = time.monotonic() + 20
        while found["ok"] < MINUTE and time.monotonic() < deadline:  # an idle ingress gives back what it had reserved
            found[complete(serving, "minute")] += 1
            time.sleep(0.2)
        found += many(serving, "minute", CLIENTS)
        passed.append(found["ok"])

    within_a_minute(trial)
    assert passed[-1] == MINUTE
    assert len(holders(serving._ingress["store"], "minute")) == 3


def test_openais_client_waits_as_long_as_it_is_told_and_then_succeeds(serving):
    within_a_minute(lambda: wait_until(lambda: many(serving, "minute", CLIENTS)["ok"] == 0, 30))
    before = time.time() // 60
    with client(serving, "minute", max_retries=2) as patient:
        patient.completions.create(model="pocket", prompt="Hi", max_tokens=1)
    assert time.time() // 60 == before + 1


def test_never_more_requests_run_at_a_time_than_the_limit_says(serving):
    def stream(_: int) -> tuple[float, float] | tuple[str | None, str | None]:
        """When the first chunk and one in the middle came, or why it was refused. A busy client reads the last ones
        when the next request may already run."""
        with client(serving, "parallel") as openai_client:
            try:
                chunks = openai_client.completions.create(
                    model="pocket", prompt="Hi", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
                )
                arrivals = [time.monotonic() for _ in chunks]
            except openai.RateLimitError as error:
                return (error.code, error.param)
        return arrivals[0], arrivals[len(arrivals) // 2]

    with ThreadPoolExecutor(CLIENTS) as threads:
        found = list(threads.map(stream, range(60)))
    ran = [(began, ended) for began, ended in found if isinstance(began, float)]
    assert {*found} - {*ran} == {("rate_limit_exceeded", "max_parallel_requests")} and len(ran) >= PARALLEL
    for first, _ in ran:
        assert sum(began <= first < ended for began, ended in ran) <= PARALLEL
    wait_until(lambda: complete(serving, "parallel") == "ok", 30)


def test_one_place_serves_requests_that_come_one_after_the_other_through_all_ingresses(serving):
    assert {complete(serving, "single") for _ in range(60)} == {"ok"}
    assert len(holders(serving._ingress["store"], "single")) == 3


def test_a_budget_ends_with_insufficient_quota_and_openais_client_does_not_try_again(serving):
    spent_s, largest_s = 0.0, 0.0
    refusals: list[tuple[str | None, str]] = []
    told = {"ignore_eos": True, "usage": {"include": True}}
    with client(serving, "budget", max_retries=5) as openai_client:
        for _ in range(2000):
            try:
                answer = openai_client.completions.create(model="pocket", prompt="Hi", max_tokens=50, extra_body=told)
            except openai.RateLimitError as error:
                refusals.append((error.code, error.response.headers["x-should-retry"]))
                if len(refusals) == 8:
                    break
                time.sleep(1.0)  # an idle ingress gives back what it had reserved
                continue
            cost_s = answer.usage.model_dump()["cost_details"]["compute_seconds"]
            spent_s, largest_s = spent_s + cost_s, max(largest_s, cost_s)
    assert refusals == [("insufficient_quota", "false")] * 8
    assert 0.95 * BUDGET_S <= spent_s <= BUDGET_S + 3 * largest_s, (
        "what runs in three ingresses may cost more than expected"
    )


def test_a_batch_waits_until_its_limit_lets_it_run_and_loses_no_line(serving):
    count = 3 * BATCH // 2
    body = {"model": "pocket", "prompt": "Hi", "max_tokens": 2}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(count)]
    while time.time() % 60 > 15:
        time.sleep(0.2)
    began = time.time() // 60
    with client(serving, "batch", max_retries=5) as openai_client:
        file = openai_client.files.create(file="\n".join(map(json.dumps, lines)).encode(), purpose="batch")
        batch = openai_client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: openai_client.batches.retrieve(batch.id).status == "completed", 200)
        counts = openai_client.batches.retrieve(batch.id).request_counts
    assert (counts.completed, counts.failed) == (count, 0)
    assert time.time() // 60 > began, "more than a minute's requests"


def test_background_responses_count_and_those_above_the_limit_fail_with_its_code(serving):
    codes: list[Counter[str]] = []

    def trial() -> None:
        found: Counter[str] = Counter()
        with client(serving, "background") as openai_client:
            for _ in range(BACKGROUND + 2):
                try:
                    made = openai_client.responses.create(
                        model="pocket", input="Hi", background=True, max_output_tokens=16
                    )
                except openai.RateLimitError as error:
                    found[str(error.code)] += 1
                    continue
                wait_until(
                    lambda made=made: openai_client.responses.retrieve(made.id).status not in ("queued", "in_progress"),
                    30,
                )
                ended = openai_client.responses.retrieve(made.id)
                found[ended.error.code if ended.error else "ok"] += 1
        codes.append(found)

    within_a_minute(trial)
    assert codes[-1] == {"ok": BACKGROUND, "rate_limit_exceeded": 2}


def test_an_ingress_that_dies_lets_nobody_exceed_a_limit(serving):
    found: Counter[str] = Counter()

    def trial() -> None:
        found.clear()
        wait_until(serving.is_whole, 240)
        if time.time() % 60 > 30:
            return
        found.update(many(serving, "killed", 10))
        with ThreadPoolExecutor(CLIENTS) as threads:
            running = [threads.submit(complete, serving, "killed") for _ in range(KILLED)]
            kill(serving.processes(INGRESS)[0])
            found.update(future.result() for future in running)
        for _ in range(3):
            found.update(many(serving, "killed", CLIENTS))
            time.sleep(1.0)

    within_a_minute(trial)
    assert set(found) <= {"ok", "gone", "rate_limit_exceeded"}
    assert KILLED / 2 <= found["ok"] <= KILLED and found["rate_limit_exceeded"]
    wait_until(serving.is_whole, 240)
