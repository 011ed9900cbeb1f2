"""Requests of many texts: computed in parts, beside those of others."""

from __future__ import annotations

import asyncio
import logging

import httpx
import hypothesis.strategies as st
from hypothesis import given

from deployments.pooling.pooling import PART_PROMPTS, PART_TOKENS, PARTS_PER_ENGINE, parts
from tests.deployments.fake_api import FakeApi, fake_api, until


def ask(api: FakeApi, count: int, user: str = "many", **headers: str) -> asyncio.Task[httpx.Response]:
    body = {"input": [[5, 6, 7]] * count, "user": user}
    return asyncio.create_task(api.client.post("/v1/embeddings", json=body, headers=headers))


@given(st.lists(st.integers(1, 3 * PART_TOKENS), max_size=200))
def test_each_prompt_is_in_one_part_the_longest_first_and_a_part_is_small_or_one_prompt(lengths):
    found = list(parts(lengths))
    order = [i for part in found for i in part]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    for part in found:
        assert len(part) == 1 or (len(part) <= PART_PROMPTS and sum(lengths[i] for i in part) <= PART_TOKENS)
    assert all(part for part in found)


async def test_another_client_has_its_turn_before_a_request_of_many_texts_is_done():
    async with fake_api(max_num_seqs=8) as api:
        api.engine.paused.set()
        many = ask(api, 5 * PART_PROMPTS)
        await until(lambda: len(api.engine.added) == PART_PROMPTS and api.model.admission.num_waiting)
        one = ask(api, 1, "one")
        await until(lambda: api.model.admission.num_waiting == PART_PROMPTS + 1)
        api.engine.paused.clear()
        assert [(await task).status_code for task in (one, many)] == [200, 200]
        numbers = [request.request_id.split("-")[1] for request in api.engine.added]
        assert numbers.index(numbers[PART_PROMPTS]) == PART_PROMPTS, "the first after one part is the other client's"
        assert len(numbers) == 5 * PART_PROMPTS + 1


async def test_no_more_than_a_few_parts_of_a_request_are_in_the_engine():
    async with fake_api(max_num_seqs=10_000) as api:
        api.engine.paused.set()
        many = ask(api, 3 * PARTS_PER_ENGINE * PART_PROMPTS)
        await until(lambda: len(api.engine.added) == PARTS_PER_ENGINE * PART_PROMPTS)
        one = ask(api, 1, "one")
        await until(lambda: len(api.engine.added) == PARTS_PER_ENGINE * PART_PROMPTS + 1)
        assert api.model.admission.num_waiting == 0
        api.engine.paused.clear()
        assert [(await task).status_code for task in (one, many)] == [200, 200]


async def test_a_request_of_more_texts_than_may_wait_is_served():
    async with fake_api(max_num_seqs=8, max_waiting=PART_PROMPTS) as api:
        answer = await ask(api, 10 * PART_PROMPTS)
        assert len(answer.json()["data"]) == 10 * PART_PROMPTS
        assert api.model.admission.num_running == api.model.admission.num_waiting == 0


async def test_a_request_that_finds_the_queue_full_is_refused_before_its_texts_are_tokenized():
    async with fake_api(max_num_seqs=8, max_waiting=PART_PROMPTS) as api:
        api.engine.paused.set()
        first = ask(api, 2 * PART_PROMPTS)
        await until(lambda: api.model.admission.num_waiting == PART_PROMPTS)
        response = await api.post("embeddings", input=["not a number" * 10_000], user="many")
        assert response.status_code == 429
        api.engine.paused.clear()
        assert (await first).status_code == 200


async def test_the_deadline_is_that_of_the_whole_request_and_what_runs_is_aborted():
    async with fake_api(max_num_seqs=8) as api:
        api.engine.paused.set()
        response = await ask(api, 2 * PART_PROMPTS, **{"X-Request-Timeout-Ms": "200"})
        assert response.status_code == 408
        assert "0.2 s" in response.json()["error"]["message"]
        await until(lambda: len(api.engine.aborted) == PART_PROMPTS)
        assert api.model.admission.num_running == api.model.admission.num_waiting == 0


async def test_one_text_of_each_part_stands_for_all_in_logs_and_timelines(caplog):
    caplog.set_level(logging.INFO)
    async with fake_api() as api:
        await ask(api, 1, **{"X-Request-Id": "warm"})
        api.model.admission.availability.report_up()
        await ask(api, PART_PROMPTS + 1, **{"X-Request-Id": "abc"})
        timelines = api.telemetry.timelines.of("abc")
        assert [timeline.reason for timeline in timelines] == ["stop", "stop"]
        assert len([record for record in caplog.records if "request ended request_id=embd-abc" in record.message]) == 2
        metrics = (await api.client.get("/metrics")).text
        assert f'finished_reason="stop",ingress="ingress-1",model_name="fake"}} {PART_PROMPTS + 2}.0' in metrics
        assert 'time_to_first_token_seconds_count{ingress="ingress-1",model_name="fake"} 0.0' in metrics
