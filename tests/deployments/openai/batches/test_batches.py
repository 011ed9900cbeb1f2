from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import openai
import pytest

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.jobs import lease as lease_module
from deployments.openai.batches.config import BatchConfig
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.token_delta import ErrorInfo
from tests.deployments.fake_api import FakeApi, fake_api, tokenizer, until
from tests.deployments.openai.batches.batches import answers, client_of, ended, jsonl, line, start


def statuses_of(api: FakeApi) -> dict[int, int]:
    """How many completions had which status."""
    route = api.telemetry.stats.routes.get("POST /v1/completions")
    return {} if route is None else route.statuses


@pytest.fixture
def batches(tmp_path: Path) -> BatchConfig:
    return BatchConfig(folder=str(tmp_path))


async def test_every_line_is_answered_as_its_route_would_in_the_output_or_the_error_file(batches, tmp_path):
    async with fake_api(batches=batches) as api:
        client = client_of(api)
        lines = [line("good"), line("bad", top_p=7), line("worse", n=0), line("also good", prompt="cd")]
        batch = await start(client, jsonl(*lines), metadata={"a": "b"})
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
        also, good = await answers(client, batch.output_file_id)
        assert also["response"]["body"]["choices"][0]["text"] == "cd"
        assert good["response"]["body"]["choices"][0]["text"] == "ab"
        assert good == {
            "id": good["id"],
            "custom_id": "good",
            "response": {"status_code": 200, "request_id": good["id"], "body": good["response"]["body"]},
            "error": None,
        }
        bad, worse = await answers(client, batch.error_file_id)
        assert (bad["response"]["status_code"], bad["error"]) == (400, None)
        assert bad["response"]["body"]["error"]["param"] == "top_p"
        assert worse["response"]["body"]["error"]["param"] == "n"
        times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
        assert times == sorted(times) and batch.expires_at == batch.created_at + 24 * 3600
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert list((tmp_path / "work").iterdir()) == []


async def test_chats_can_be_batched_and_the_upload_may_be_deleted_meanwhile(batches):
    async with fake_api(batches=batches) as api:
        client = client_of(api)
        api.engine.paused.set()
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        batch = await start(client, jsonl(request), "/v1/chat/completions")
        await client.files.delete(batch.input_file_id)
        api.engine.paused.clear()
        batch = await ended(client, batch.id)
        (answer,) = await answers(client, batch.output_file_id)
        assert answer["response"]["body"]["object"] == "chat.completion"


async def test_all_that_is_wrong_with_the_lines_is_told_with_their_numbers(batches):
    async with fake_api(batches=batches) as api:
        client = client_of(api)
        other = {"custom_id": "f", "method": "POST", "url": "/v1/completions"}
        content = b"\n".join(
            [
                jsonl(line("a"), line("a"), line("b", url="/v1/embeddings"), line("c", method="GET")),
                b'{"custom_id": \n[1]\n\xff\n' + b"[" * 10_000,
                jsonl(line(7), other, {**other, "body": 3}, line("h", stream=True), line("i", model="fake")),
            ]
        )
        batch = await ended(client, (await start(client, content)).id)
        assert (batch.status, batch.request_counts.total) == ("failed", 13)
        assert batch.failed_at and batch.output_file_id is None and batch.errors is not None
        assert [(error.line, error.code, error.param) for error in batch.errors.data or []] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "url_mismatch", "url"),
            (4, "invalid_method", "method"),
            (6, "invalid_json_line", None),
            (7, "invalid_json_line", None),
            (8, "invalid_json_line", None),
            (9, "invalid_json_line", None),
            (10, "invalid_custom_id", "custom_id"),
            (11, "missing_required_parameter", "body"),
            (12, "invalid_body", "body"),
            (13, "invalid_body", "body.stream"),
            (14, "model_mismatch", "body.model"),
        ]
        empty = await ended(client, (await start(client, b"\n")).id)
        assert [error.code for error in empty.errors.data] == ["empty_file"]
        content = jsonl(line("a", model="other"))
        unknown = await ended(client, (await start(client, content)).id)
        assert [error.code for error in unknown.errors.data] == ["model_not_found"]


async def test_a_cancelled_batch_keeps_what_is_answered_and_frees_the_engine_of_the_rest(batches):
    async with fake_api(batches=batches) as api:
        client = client_of(api)
        endless = [line(f"line {i}", max_tokens=200) for i in range(40)]
        batch = await start(client, jsonl(line("bad", top_p=7), line("good"), *endless))
        await until(lambda: len(api.engine.added) == 1 + 16)
        api.engine.paused.set()
        batch = await client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
        done, failed = await answers(client, batch.output_file_id), await answers(client, batch.error_file_id)
        assert (len(done), len(failed)) == (batch.request_counts.completed, batch.request_counts.failed)
        assert len(done) == 1 and len({answer["custom_id"] for answer in done + failed}) == 42
        codes = [answer["error"] and answer["error"]["code"] for answer in failed]
        assert codes.count(None) == 1 and set(codes) == {None, "batch_cancelled"}
        await until(lambda: len(api.engine.aborted) == 16)
        api.engine.paused.clear()
        with pytest.raises(openai.ConflictError, match="status 'completed'"):
            await client.batches.cancel((await ended(client, (await start(client, jsonl(line("a")))).id)).id)


async def test_what_is_not_answered_in_the_window_has_expired(batches, monkeypatch):
    async with fake_api(batches=batches) as api:
        client = client_of(api)
        api.engine.paused.set()
        monkeypatch.setattr("deployments.openai.batches.store.HOUR_S", 0)
        batch = await ended(client, (await start(client, jsonl(line("a")))).id)
        assert batch.status == "expired" and batch.expired_at >= batch.expires_at
        (answer,) = await answers(client, batch.error_file_id)
        assert (answer["response"], answer["error"]["code"]) == (None, "batch_expired")


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_a_line_that_is_computed_again_after_its_server_was_killed_has_the_same_answer(
    tmp_path, endpoint, monkeypatch
):
    monkeypatch.setattr(lease_module, "LEASE_S", 1.0)
    monkeypatch.setattr(lease_module, "RENEW_S", 0.25)

    def drawn(request: GenerateRequest) -> list[int]:
        assert request.params.seed is not None
        return tokenizer().encode("".join(chr(97 + (request.params.seed >> i) % 26) for i in range(20)))

    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in endpoint else {"prompt": "a"}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": endpoint, "body": {**prompt, "max_tokens": 9, "n": 2}}
        for i in range(3)
    ]
    killed, other = tmp_path / "killed", tmp_path / "other"
    found = []
    async with fake_api(drawn, batches=BatchConfig(folder=str(other))) as api:
        api.engine.paused.set()
        batch_id = (await start(client_of(api), jsonl(*lines), endpoint)).id
        await until(lambda: len(api.engine.added) == 6)
        shutil.copytree(other, killed)  # as it is found after a SIGKILL
        api.engine.paused.clear()
        batch = await ended(client_of(api), batch_id)
        found.append(await answers(client_of(api), batch.output_file_id))
    await asyncio.sleep(1.1)  # the times of answers are in seconds
    async with fake_api(drawn, batches=BatchConfig(folder=str(killed))) as api:
        batch = await ended(client_of(api), batch_id)
        found.append(await answers(client_of(api), batch.output_file_id))
        assert len(api.engine.added) == 6
    assert found[0] == found[1] and len(found[0]) == 3


async def test_a_batch_waits_for_engines_that_are_busy_or_gone(batches):
    async with fake_api(batches=batches, max_replays=0) as api:
        client = client_of(api)
        api.engine.refusal = ErrorInfo.of(EngineUnavailable("gone"))
        batch = await start(client, jsonl(line("a")))
        await until(lambda: 503 in statuses_of(api))
        api.engine.refusal = None
        batch = await ended(client, batch.id)
        assert batch.request_counts.completed == 1


async def test_batches_are_a_client_of_their_own_and_run_after_all_others(batches):
    async with fake_api(batches=batches, has_priorities=True) as api:
        client = client_of(api)
        await ended(client, (await start(client, jsonl(line("a", user="me", priority=-5)))).id)
        assert [request.priority for request in api.engine.added] == [2**31 - 1]
        await api.post("completions", prompt="a", max_tokens=1)
        assert api.engine.added[-1].priority == 0


async def test_while_requests_wait_a_batch_runs_one_line_at_a_time(batches):
    limits = {"max_num_seqs": 8, "max_waiting": 1000}
    async with fake_api(batches=batches, **limits) as api:
        client = client_of(api)
        api.engine.paused.set()
        asking = [asyncio.create_task(api.post("completions", prompt="x", max_tokens=1)) for _ in range(20)]
        await until(lambda: api.model.admission.num_waiting == 11)
        batch = await start(client, jsonl(*(line(f"line {i}") for i in range(40))))
        await until(lambda: api.model.admission.num_waiting == 12)
        api.engine.paused.clear()
        await asyncio.gather(*asking)
        assert (await ended(client, batch.id)).request_counts.completed == 40
        order = [request.priority for request in api.engine.added]
        assert len(order) == 60


async def test_many_large_batches_of_one_key_do_not_hold_the_single_line_of_another(tmp_path, batches):
    keys = tuple(f"{name}:{hash_key(name)}" for name in "ab")
    limits = {"max_num_seqs": 4, "max_waiting": 1000}
    async with fake_api(batches=batches, auth=AuthConfig(api_keys=keys), **limits) as api:
        one, other = client_of(api, "a"), client_of(api, "b")
        large = [await start(one, jsonl(*(line(f"line {i}", max_tokens=100) for i in range(2_000)))) for _ in range(6)]
        await until(lambda: api.model.admission.num_waiting)
        small = await ended(other, (await start(other, jsonl(line("a")))).id)
        assert small.request_counts.completed == 1
        statuses = [(await one.batches.retrieve(batch.id)).status for batch in large]
        assert statuses == ["in_progress"] * 4 + ["validating"] * 2
        for batch in large:
            await one.batches.cancel(batch.id)


async def test_many_background_responses_of_one_key_do_not_hold_that_of_another():
    keys = tuple(f"{name}:{hash_key(name)}" for name in "ab")
    async with fake_api(auth=AuthConfig(api_keys=keys), max_num_seqs=4) as api:
        api.engine.paused.set()
        body = {"input": "hello", "background": True, "max_output_tokens": 20}
        one, other = ({"Authorization": f"Bearer {key}"} for key in "ab")
        for _ in range(50):
            await api.client.post("/v1/responses", json=body, headers=one)
        await until(lambda: api.model.admission.num_waiting > 40)
        made = (await api.client.post("/v1/responses", json=body, headers=other)).json()["id"]
        num_running = len(api.engine.added)
        api.engine.paused.clear()
        await until(lambda: len(api.engine.added) == 51)
        (turn,) = [i for i, request in enumerate(api.engine.added) if made in request.request_id]
        assert turn <= num_running + 1


async def test_a_key_neither_sees_nor_cancels_the_batches_of_another(tmp_path, batches):
    keys = tmp_path / "keys"
    keys.write_text(f"a:{hash_key('sk-a')}\nb:{hash_key('sk-b')}\n")
    async with fake_api(batches=batches, auth=AuthConfig(api_keys_file=str(keys))) as api:
        mine, others = client_of(api, "sk-a"), client_of(api, "sk-b")
        batch = await start(mine, jsonl(line("a")))
        assert (await ended(mine, batch.id)).request_counts.completed == 1
        for call in (others.batches.retrieve, others.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        assert [found.id async for found in others.batches.list()] == []
        with pytest.raises(openai.NotFoundError, match="file-"):
            await others.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )


async def test_batches_are_listed_by_page_the_newest_first(batches):
    async with fake_api(batches=batches) as api:
        client = client_of(api)
        made = [(await start(client, jsonl(line("a")))).id for _ in range(5)]
        assert [found.id async for found in client.batches.list(limit=2)] == made[::-1]
        page = await client.batches.list(limit=2)
        assert page.has_more and not (await client.batches.list(limit=5)).has_more
        for batch_id in made:
            await ended(client, batch_id)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input_file_id": "file-1"}, "there is no 'file-1'"),
        ({"endpoint": "/v1/videos"}, "endpoint must be"),
        ({"completion_window": "1d"}, "completion_window must"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 7}}, "output_expires_after.seconds must be"),
    ],
)
async def test_a_batch_that_cannot_be_is_told_why(batches, fields, told):
    async with fake_api(batches=batches) as api:
        good = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}
        response = await api.client.post("/v1/batches", json={**good, **fields})
        assert response.status_code in (400, 404)
        assert told in response.json()["error"]["message"]
