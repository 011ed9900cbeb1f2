"""Adapters over HTTP, on an engine that records what it is asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.parts.adapters.files import open_served
from deployments.parts.adapters.sources import AdapterSources
from deployments.served_adapter import ServedAdapter
from deployments.storage.config import StoreConfig
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.token_delta import ErrorInfo
from tests.adapter_folders import write_adapter
from tests.deployments.fake_api import FakeApi, fake_api, until
from tests.deployments.jobs.test_jobs import change_record, events_of

OPEN = AuthConfig(allow_runtime_lora_updating=True)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> ServedAdapter:
    return open_served("own", str(write_adapter(tmp_path_factory.mktemp("own"))), "fake", 16)


def config(own: ServedAdapter, folder: Path | None = None) -> AdapterSources:
    return AdapterSources(modules=(own,), dynamic_folder=folder and str(folder), max_rank=16)


async def load(api: FakeApi, path: object, name: str = "sql", **more: Any) -> tuple[int, str]:
    answer = await api.post("load_lora_adapter", lora_name=name, lora_path=str(path), **more)
    return answer.status_code, answer.text


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/score": {"queries": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
}


@pytest.mark.parametrize("route", REQUESTS)
async def test_a_request_names_an_adapter_as_its_model(own, route):
    async with fake_api(of={"adapters": config(own)}) as api:
        for name, lora in (("own", own.record), ("fake:own", own.record), ("fake", None)):
            api.engine.added.clear()
            answer = await api.client.post(route, json={"model": name, **REQUESTS[route]})
            assert answer.status_code == 200, answer.text
            assert {request.record(ModelAdapter) for request in api.engine.added} <= {lora}
            assert answer.json().get("model", "own") in ("own", "fake")
            assert bool(api.engine.added) == (route != "/tokenize")
        answer = await api.client.post(route, json={"model": "other", **REQUESTS[route]})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_the_list_of_models_has_adapters_with_their_parents(own, tmp_path):
    write_adapter(tmp_path / "found")
    async with fake_api(of={"adapters": config(own, tmp_path)}, auth=OPEN) as api:
        assert await load(api, own.path) == (200, "Success: LoRA adapter 'sql' added successfully.")
        cards = {card["id"]: card for card in (await api.client.get("/v1/models")).json()["data"]}
        assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
            "fake": ("fake", None),
            "own": (own.path, "fake"),
            "sql": (own.path, "fake"),
            "found": (str(tmp_path / "found"), "fake"),
        }
        for name, card in cards.items():
            assert (await api.client.get(f"/v1/models/{name}")).json() == card
        assert (await api.post("completions", prompt="a", max_tokens=1, model="found")).json()["model"] == "found"


async def test_an_adapter_is_loaded_replaced_and_unloaded_while_the_server_runs(own, tmp_path):
    async with fake_api(of={"adapters": config(own)}, auth=OPEN) as api:
        first, second = write_adapter(tmp_path / "1", seed=1), write_adapter(tmp_path / "2", seed=2)
        assert (await load(api, first))[0] == 200
        status, text = await load(api, second)
        assert status == 400 and "'sql' has already been loaded. If you want to load the adapter in place" in text
        assert (await load(api, second, load_inplace=True))[0] == 200
        loaded = [lora.digest for lora in api.engine.loaded]
        assert len(set(loaded)) == 2
        stats = api.telemetry.stats.model("fake")
        await api.post("completions", prompt="a", max_tokens=1, model="sql")
        assert api.engine.added[-1].record(ModelAdapter) == api.engine.loaded[-1] and stats.adapters == {"sql": 1}
        gone = await api.post("unload_lora_adapter", lora_name="sql")
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await api.post("completions", prompt="a", model="sql")).status_code == 404
        gone = await api.post("unload_lora_adapter", lora_name="sql")
        assert gone.status_code == 404 and "The lora adapter 'sql' cannot be found." in gone.text


async def test_what_is_unloaded_ends_for_those_who_have_begun_and_for_nobody_else(own):
    async with fake_api(of={"adapters": config(own)}, auth=OPEN) as api:
        api.engine.paused.set()
        begun = asyncio.create_task(api.post("completions", prompt="a", max_tokens=3, model="own"))
        await until(lambda: api.engine.num_live)
        assert (await api.post("unload_lora_adapter", lora_name="own")).status_code == 200
        assert (await api.post("completions", prompt="a", model="own")).status_code == 404
        api.engine.paused.clear()
        answer = await begun
        assert (answer.status_code, answer.json()["model"]) == (200, "own")
        assert (await load(api, own.path, "own"))[0] == 200


async def test_each_refusal_has_its_status(own, tmp_path):
    async with fake_api(of={"adapters": config(own)}, auth=OPEN) as api:
        for name, path in (("", "x"), ("x", "")):
            status, text = await load(api, path, name)
            assert status == 400 and "Both 'lora_name' and 'lora_path' must be provided." in text
        answer = await api.post("unload_lora_adapter")
        assert answer.status_code == 400 and "needs to be provided" in answer.text
        assert (await load(api, tmp_path / "none"))[0] == 404
        status, text = await load(api, write_adapter(tmp_path / "large", rank=32))
        assert status == 400 and "rank must be at most max_lora_rank (16), got 32" in text
        status, text = await load(api, write_adapter(tmp_path / "dora", use_dora=True))
        assert status == 400 and "use_dora" in text
        truncated = write_adapter(tmp_path / "truncated") / "adapter_model.safetensors"
        truncated.write_bytes(truncated.read_bytes()[:-5])
        assert (await load(api, truncated.parent))[0] == 400
        assert (await load(api, own.path, "fake"))[0] == 400  # the model's own name
        for status in (400, 500):
            api.engine.adapter_error = ErrorInfo(
                code="x", message="no such layer", type="t", status=status, retryable=False
            )
            assert (await load(api, own.path))[0] == status
        assert [card["id"] for card in (await api.client.get("/v1/models")).json()["data"]] == ["fake", "own"]


async def test_nobody_changes_adapters_where_that_is_not_allowed(own):
    async with fake_api(of={"adapters": config(own)}) as api:
        assert (await load(api, own.path))[0] == 404
    keys = (key_line("admin", "sk-a"), key_line("user", "sk-u"))
    auth = AuthConfig(allow_runtime_lora_updating=True, api_keys=keys, admin_keys=("admin",))
    async with fake_api(of={"adapters": config(own)}, auth=auth) as api:
        body = {"lora_name": "sql", "lora_path": own.path}
        for key, status in (("sk-u", 403), ("sk-a", 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await api.client.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert answer.status_code == status


async def test_a_key_may_be_limited_to_some_models_and_adapters(own, tmp_path):
    write_adapter(tmp_path / "found")
    auth = AuthConfig(api_keys=(key_line("all", "sk-all"), key_line("some", "sk-some", "own")))
    async with fake_api(of={"adapters": config(own, tmp_path)}, auth=auth) as api:

        async def status(key: str, model: str | None) -> int:
            body = {"model": model, "prompt": "a", "max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            return (await api.client.post("/v1/completions", json=body, headers=headers)).status_code

        assert [await status("sk-all", name) for name in ("fake", "own", "found", None)] == [200] * 4
        assert [await status("sk-some", name) for name in ("fake", "own", "found", "fake:own", None)] == [
            404, 200, 404, 404, 400,
        ]  # fmt: skip
        listed = await api.client.get("/v1/models", headers={"authorization": "Bearer sk-some"})
        assert [card["id"] for card in listed.json()["data"]] == ["own"]


async def test_an_answer_says_by_its_fingerprint_which_weights_it_has(own, tmp_path):
    async with fake_api(of={"adapters": config(own)}, auth=OPEN, fingerprint="fp_a_b_c_d") as api:

        async def fingerprint(model: str) -> str:
            answer = await api.post("completions", prompt="a", max_tokens=1, model=model)
            return str(answer.json()["system_fingerprint"])

        assert await fingerprint("fake") == "fp_a_b_c_d"
        assert await fingerprint("own") == f"fp_a_b_c_d_{own.digest[:8]}"
        await load(api, write_adapter(tmp_path, seed=1))
        before = await fingerprint("sql")
        await load(api, write_adapter(tmp_path, seed=2), load_inplace=True)
        assert await fingerprint("sql") != before


async def test_logs_timelines_and_metrics_name_the_adapter(own, caplog):
    caplog.set_level("INFO")
    async with fake_api(of={"adapters": config(own)}) as api:
        await api.post("completions", prompt="a", max_tokens=1, model="own", request_id="x")
        assert any("model=fake adapter=own" in line for line in caplog.messages if "request ended" in line)
        (timeline,) = (await api.client.get("/debug/requests/x")).json()["sequences"]
        assert timeline["adapter"] == "own"
        metrics = (await api.client.get("/metrics")).text
        assert 'manta_adapter_requests_total{adapter="own",ingress="ingress-1",model_name="fake"} 1.0' in metrics


KEEPING: dict[str, Any] = {"of": {"adapters": AdapterSources(max_rank=16)}, "auth": OPEN, "fingerprint": "fp"}
KEYED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


async def keyed(api: FakeApi, route: str, key: str = "k", **more: Any) -> httpx.Response:
    body = {"model": "sql", **REQUESTS[route], **more}
    return await api.client.post(route, json=body, headers={"Idempotency-Key": f"{key} {route}"})


async def test_an_answer_that_is_kept_outlives_its_adapter(tmp_path):
    store = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
    options = KEEPING | {"store": store}
    first, second = write_adapter(tmp_path / "1", seed=1), write_adapter(tmp_path / "2", seed=2)
    async with fake_api(**options) as api:
        assert (await load(api, first))[0] == 200
        answers = {route: await keyed(api, route) for route in KEYED}
        assert {answer.status_code for answer in answers.values()} == {200}
        behind = (await keyed(api, "/v1/responses", "b", background=True)).json()["id"]
        while (await api.client.get(f"/v1/responses/{behind}")).json()["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
        await api.post("unload_lora_adapter", lora_name="sql")
        computed = len(api.engine.added)
        for served in (404, 200):  # gone, then there with other weights
            for route, answer in answers.items():
                again = (await keyed(api, route)).json()
                assert again | {"completed_at": 0} == answer.json() | {"completed_at": 0}, route
                assert (await keyed(api, route, "k", max_tokens=9)).status_code == 422
            assert (await api.client.get(f"/v1/responses/{behind}")).json()["model"] == "sql"
            assert len(api.engine.added) == computed
            assert (await api.post("completions", prompt="a", max_tokens=1, model="sql")).status_code == served
            assert (await load(api, second, load_inplace=True))[0] == 200
            computed = len(api.engine.added)
    async with fake_api(**options) as api:  # another ingress, which never knew the adapter
        for route, answer in answers.items():
            assert (await keyed(api, route)).json()["id"] == answer.json()["id"], route
        assert not api.engine.added


async def test_an_answer_that_another_ingress_takes_over_has_the_weights_it_began_with_or_none(tmp_path):
    store = StoreConfig(url=f"sqlite://{tmp_path}/store.db")
    options = KEEPING | {"store": store}
    route = "/v1/completions"
    folder = write_adapter(tmp_path / "1", seed=1)
    async with fake_api(**options) as api:
        await load(api, folder)
        whole = events_of((await keyed(api, route, stream=True)).text)
        began = api.engine.added[-1].record(ModelAdapter)
    stream_id = whole[0][0][:32]
    for known in (False, True):
        await change_record(store, stream_id, outputs=None)  # as if it had died before the end
        async with fake_api(**options) as api:
            if known:  # other weights have the name now
                await load(api, write_adapter(tmp_path / "2", seed=2))
            assert events_of((await keyed(api, route, stream=True)).text) == whole
            assert [request.record(ModelAdapter) for request in api.engine.added] == [began]
    write_adapter(folder, seed=3)  # nothing has the weights any more
    await change_record(store, stream_id, outputs=None)
    async with fake_api(**options) as api:
        assert (await keyed(api, route, stream=True)).status_code == 404
        await load(api, folder)
        answer = await keyed(api, route, stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_not_reproducible")
        assert not api.engine.added


async def test_a_batch_may_be_for_an_adapter(own, tmp_path):
    from deployments.openai.batches.config import BatchConfig

    async with fake_api(of={"adapters": config(own)}, batches=BatchConfig(folder=str(tmp_path))) as api:
        body = {"model": "own", "prompt": "a", "max_tokens": 1}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
        files = {"file": ("in.jsonl", json.dumps(line).encode())}
        upload = await api.client.post("/v1/files", files=files, data={"purpose": "batch"})
        batch = await api.post(
            "batches", input_file_id=upload.json()["id"], endpoint="/v1/completions", completion_window="24h"
        )
        url = f"/v1/batches/{batch.json()['id']}"
        async with asyncio.timeout(60):
            while (found := (await api.client.get(url)).json())["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.02)
        assert (found["status"], found["request_counts"]["completed"]) == ("completed", 1), found
        assert api.engine.added[-1].record(ModelAdapter) == own.record
