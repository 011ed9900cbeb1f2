"""Adapters in a bucket: fsspec's, in memory."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from deployments.parts.adapters import dynamic_folder, places
from deployments.parts.adapters.dynamic_folder import DynamicFolder
from engine import bucket_url
from engine.lora import bucket
from engine.lora.adapter_files import open_adapter
from engine.lora.errors import AdapterError, AdapterNotFound
from tests.adapter_folders import write_adapter


@pytest.fixture
def copies(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(bucket_url, "SCHEMES", (*bucket_url.SCHEMES, "memory"))
    monkeypatch.setattr(bucket, "COPIES", str(tmp_path / "copies"))
    fsspec.filesystem("memory").store.clear()
    return tmp_path / "copies"


def put(folder: Path, url: str) -> str:
    files, root = fsspec.core.url_to_fs(url)
    for file in folder.iterdir():
        files.pipe_file(f"{root}/{file.name}", file.read_bytes())
    return url


def test_an_adapter_in_a_bucket_is_that_of_its_files_as_they_are_now(copies, tmp_path):
    for seed in (0, 1):
        local = write_adapter(tmp_path / "sql", seed=seed)
        url = put(local, "memory://bucket/adapters/sql")
        for _ in range(2):
            assert open_adapter(url).digest == open_adapter(local).digest
    assert len(list(copies.iterdir())) == 2  # read twice, copied once


def test_copies_that_were_used_least_recently_are_deleted(copies, tmp_path, monkeypatch):
    local = write_adapter(tmp_path / "sql")
    monkeypatch.setattr(bucket, "MAX_BYTES", 2 * sum(file.stat().st_size for file in local.iterdir()))
    urls = [put(local, f"memory://bucket/{name}") for name in "abc"]
    copies.mkdir()
    (copies / "gone").symlink_to("nowhere")  # as a copy that another process has just deleted
    kept = [bucket.local_copy(url, "x") for url in urls]
    assert [copy.is_dir() for copy in kept] == [False, True, True]
    assert open_adapter(urls[0]).digest == open_adapter(local).digest


def test_what_a_bucket_does_not_have_or_has_in_part_is_refused_and_leaves_nothing(copies, tmp_path, monkeypatch):
    with pytest.raises(AdapterNotFound, match=r"adapter 'sql'.*memory://bucket/none"):
        open_adapter("memory://bucket/none", "sql")
    url = put(write_adapter(tmp_path / "sql"), "memory://bucket/sql")
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/adapter_model.safetensors", files.cat_file(f"{root}/adapter_model.safetensors")[:-5])
    with pytest.raises(AdapterError, match="whole"):
        open_adapter(url)

    def fails(self: bucket.Bucket, name: str, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("half")
        raise AdapterError(name, "path", self.url, "readable")

    monkeypatch.setattr(bucket.Bucket, "copy", fails)
    url = put(write_adapter(tmp_path / "sql"), "memory://bucket/other")
    before = set(copies.iterdir())
    with pytest.raises(AdapterError, match="readable"):
        open_adapter(url)
    assert set(copies.iterdir()) == before


def test_files_that_change_while_they_are_copied_are_copied_again(copies, tmp_path, monkeypatch):
    url = put(write_adapter(tmp_path / "1", seed=1), "memory://bucket/sql")
    second, copy = write_adapter(tmp_path / "2", seed=2), bucket.Bucket.copy

    def replaced(self: bucket.Bucket, name: str, folder: Path) -> None:
        copy(self, name, folder)
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            put(second, url)

    monkeypatch.setattr(bucket.Bucket, "copy", replaced)
    assert open_adapter(url).digest == open_adapter(second).digest
    assert len(list(copies.iterdir())) == 1


def test_a_bucket_without_its_library_is_refused_with_the_name_of_that(copies):
    with pytest.raises(AdapterError, match="s3fs"):
        open_adapter("s3://bucket/sql")


async def test_a_dynamic_folder_may_be_in_a_bucket(copies, tmp_path, monkeypatch):
    now = [100.0]
    for module in (dynamic_folder, places):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    put(write_adapter(tmp_path / "1", seed=1), "memory://bucket/adapters/sql")
    put(write_adapter(tmp_path / "0"), "memory://bucket/outside")
    folder = DynamicFolder("memory://bucket/adapters/", "base", max_rank=16)
    assert await folder.names() == ["sql"] and "sql" in folder
    first = await folder.find("sql")
    assert first is not None and first.path == "memory://bucket/adapters/sql"
    for name in ("other", "../outside", "..", "", ".", "s*", "s?l", "sql/../../outside", "sql/"):
        assert await folder.find(name) is None and name not in folder
    put(write_adapter(tmp_path / "2", seed=2), "memory://bucket/adapters/sql")
    assert await folder.find("sql") is first
    now[0] += places.BUCKET_S
    second = await folder.find("sql")
    assert second is not None and second.digest == open_adapter(tmp_path / "2").digest
    put(write_adapter(tmp_path / "3"), "memory://bucket/adapters/late")
    assert await folder.find("late") is not None and "late" not in folder
    now[0] += places.BUCKET_S
    await folder.read()
    assert "late" in folder

    def away(*args: object) -> None:
        raise ConnectionError("away")

    now[0] += places.BUCKET_S
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", away)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", away)
    assert await folder.find("sql") is second and await folder.names() == ["late", "sql"]
    with pytest.raises(AdapterError, match="ConnectionError: away"):
        await folder.find("new")
