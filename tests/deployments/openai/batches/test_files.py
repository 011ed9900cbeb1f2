from __future__ import annotations

import os
import shutil
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from httpx import Response

from deployments.frontend.api_keys import hash_key
from deployments.http.middleware import AuthConfig
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.files import DAY_S, MAX_AGE_S, Files
from deployments.storage.sqlite import SqliteStore
from tests.deployments.fake_api import FakeApi, fake_api
from tests.scenarios import run

PURPOSE = {"purpose": "batch"}


@pytest.fixture
def batches(tmp_path: Path) -> BatchConfig:
    return BatchConfig(folder=str(tmp_path))


async def upload(api: FakeApi, content: bytes = b"{}\n", **fields: Any) -> Response:
    file = ("in.jsonl", content)
    return await api.client.post("/v1/files", files={"file": file}, data=PURPOSE, **fields)


async def test_openais_client_uploads_lists_reads_and_deletes_a_file(batches):
    async with fake_api(batches=batches) as api:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://fake/v1", http_client=api.client)
        file = await client.files.create(file=("a b\n.jsonl", b"one\ntwo\n"), purpose="batch")
        assert (file.bytes, file.purpose, file.status) == (8, "batch", "processed")
        assert file.expires_at == file.created_at + MAX_AGE_S
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == b"one\ntwo\n"
        short = await client.files.create(
            file=b"", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert short.expires_at == short.created_at + 3600
        assert [found.id async for found in client.files.list(limit=1)] == [short.id, file.id]
        assert [found.id async for found in client.files.list(limit=1, order="asc")] == [file.id, short.id]
        assert [found.id async for found in client.files.list(purpose="batch_output")] == []
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(file.id)


@pytest.mark.parametrize(
    ("request_of", "status", "told"),
    [
        ({"files": {"file": ("a", b"")}}, 400, "purpose is required"),
        ({"files": {"file": ("a", b"")}, "data": {"purpose": "vision"}}, 400, "purpose must be 'batch', got 'vision'"),
        ({"files": {"file": (None, b"text")}, "data": PURPOSE}, 400, "file must be a file with a name, got 'text'"),
        ({"files": {"other": ("a", b"")}, "data": PURPOSE}, 400, "file is required"),
        ({"files": [("file", ("a", b"")), ("file", ("b", b""))], "data": PURPOSE}, 400, "Too many files"),
        (
            {"files": {"file": ("a", b"")}, "data": {**PURPOSE, "expires_after[seconds]": "59"}},
            400,
            "expires_after.anchor is required",
        ),
        ({"json": PURPOSE}, 415, "Content-Type must be multipart/form-data, got 'application/json'"),
        ({"content": b"", "headers": {"Content-Type": "multipart/form-data"}}, 400, "Missing boundary in multipart."),
    ],
)
async def test_an_upload_that_is_not_as_it_should_be_is_told_why(batches, request_of, status, told):
    async with fake_api(batches=batches) as api:
        response = await api.client.post("/v1/files", **request_of)
        assert response.status_code == status
        assert told in response.json()["error"]["message"]


async def test_an_upload_may_be_larger_than_other_bodies_up_to_its_own_limit(batches):
    auth = AuthConfig(max_body_bytes=1000, max_upload_bytes=3000)
    async with fake_api(batches=batches, auth=auth) as api:
        assert (await upload(api, bytes(2000))).json()["bytes"] == 2000
        assert (await upload(api, bytes(4000))).status_code == 413
        assert (await api.post("completions", prompt="x" * 2000)).status_code == 413


async def test_a_key_neither_sees_nor_deletes_the_files_of_another(tmp_path, batches):
    keys = tmp_path / "keys"
    keys.write_text(f"a:{hash_key('sk-a')}\nb:{hash_key('sk-b')}\n")
    async with fake_api(batches=batches, auth=AuthConfig(api_keys_file=str(keys))) as api:
        mine, others = ({"Authorization": f"Bearer sk-{name}"} for name in "ab")
        path = f"/v1/files/{(await upload(api, headers=mine)).json()['id']}"
        for response in (
            await api.client.get(path, headers=others),
            await api.client.get(f"{path}/content", headers=others),
            await api.client.delete(path, headers=others),
        ):
            assert response.status_code == 404
        assert (await api.client.get("/v1/files", headers=others)).json()["data"] == []
        assert (await api.client.get(path, headers=mine)).status_code == 200


async def test_a_web_page_of_another_origin_cannot_upload(batches):
    async with fake_api(batches=batches, auth=AuthConfig(allowed_origins=("https://mine",))) as api:
        assert (await upload(api, headers={"Origin": "https://other"})).status_code == 403
        assert (await upload(api, headers={"Origin": "https://mine"})).status_code == 200


@pytest.mark.parametrize("name", ["nothing", "file-0", "..%2Fkeys", "file-" + "0" * 32])
async def test_a_name_that_is_no_files_id_is_a_404(batches, name):
    async with fake_api(batches=batches) as api:
        assert (await api.client.get(f"/v1/files/{name}")).status_code == 404
        assert (await api.client.delete(f"/v1/files/{name}")).status_code == 404


async def test_without_a_folder_the_error_names_the_key_that_gives_one(api):
    response = await upload(api)
    assert response.status_code == 404
    assert "ingress.batch_dir" in response.json()["error"]["message"]


def test_a_full_disk_is_an_error_of_its_own_and_leaves_nothing_behind(tmp_path, batches, monkeypatch):
    async def scenario() -> None:
        async with fake_api(batches=batches) as api:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
            response = await upload(api)
            assert response.status_code == 507
            assert "No space left on device" in response.json()["error"]["message"]
            monkeypatch.undo()
            monkeypatch.setattr(os, "fsync", full_disk)
            assert (await upload(api)).status_code == 507
            assert list((tmp_path / "files").iterdir()) == []

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    run(scenario())


async def test_other_users_of_the_machine_cannot_read_what_is_stored(batches, tmp_path):
    async with fake_api(batches=batches) as api:
        await upload(api)
        assert (tmp_path / "files").stat().st_mode & 0o077 == 0


async def test_expired_files_are_gone_and_are_removed_with_what_was_left_behind(tmp_path, monkeypatch):
    store = SqliteStore(str(tmp_path / "batches.db"), 2**20)
    files = Files(tmp_path / "files", store)
    _short, long = [await files.upload(BytesIO(b"{}"), None, "a", age) for age in (3600, MAX_AGE_S)]
    (tmp_path / "files" / f"file-{0:032x}.data").touch()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + DAY_S)
    assert await files.page(None, 10, None) == ([long], False)
    await files.remove_expired()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [f"{long.id}.data"]
    await store.close()
