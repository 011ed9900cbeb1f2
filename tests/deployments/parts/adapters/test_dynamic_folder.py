from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.parts.adapters import dynamic_folder
from deployments.parts.adapters.dynamic_folder import DynamicFolder
from deployments.parts.adapters.files import open_served
from deployments.served_adapter import ServedAdapter
from engine.lora.errors import AdapterError
from tests.adapter_folders import write_adapter


def find(folder: DynamicFolder, name: str) -> ServedAdapter | None:
    return asyncio.run(folder.find(name))


@pytest.fixture
def root(tmp_path) -> Path:
    write_adapter(tmp_path / "outside")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_a_sub_folder_is_an_adapter_of_its_name(root):
    write_adapter(root / "sql")
    folder = DynamicFolder(str(root), "base", max_rank=16)
    found = find(folder, "sql")
    assert found is not None
    assert (found.name, found.path, found.parent) == ("sql", str(root / "sql"), "base")
    assert asyncio.run(folder.names()) == ["sql"] and "sql" in folder


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../outside", "a/../../outside", "/etc", "..\\outside", "a\0b", "x" * 300]
)
def test_no_name_leaves_the_folder(root, name):
    write_adapter(root / "a")
    folder = DynamicFolder(str(root), "base", max_rank=16)
    assert find(folder, name) is None and name not in folder


@pytest.mark.parametrize("links", ["the folder", "its weights"])
def test_no_link_leaves_the_folder(root, links):
    outside = root.parent / "outside"
    if links == "the folder":
        (root / "link").symlink_to(outside)
    else:
        write_adapter(root / "link")
        (root / "link" / "adapter_model.safetensors").unlink()
        (root / "link" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    folder = DynamicFolder(str(root), "base", max_rank=16)
    assert find(folder, "link") is None and asyncio.run(folder.names()) == []


def test_a_link_inside_is_followed(root):
    write_adapter(root / "versions" / "2")
    (root / "sql").symlink_to("versions/2")
    assert find(DynamicFolder(str(root), "base", max_rank=16), "sql") is not None


def test_other_weights_under_the_name_are_another_adapter(root):
    write_adapter(root / "sql")
    folder = DynamicFolder(str(root), "base", max_rank=16)
    first, again = find(folder, "sql"), find(folder, "sql")
    assert first is again
    write_adapter(root / "new", seed=1).rename(root / "tmp")
    (root / "sql").rename(root / "old")
    (root / "tmp").rename(root / "sql")
    second = find(folder, "sql")
    assert first is not None and second is not None and first.digest != second.digest


def test_what_is_missing_is_not_looked_for_again_for_a_while(root, monkeypatch):
    folder, opened, now = DynamicFolder(str(root), "base", max_rank=16), [], [100.0]
    monkeypatch.setattr(dynamic_folder.time, "monotonic", lambda: now[0])
    look = folder._place.version
    monkeypatch.setattr(folder._place, "version", lambda name: opened.append(name) or look(name))
    assert [find(folder, "sql") for _ in range(3)] == [None] * 3 and len(opened) == 1
    write_adapter(root / "sql")
    now[0] += 2 * dynamic_folder.MISSING_S
    assert find(folder, "sql") is not None


def test_an_adapter_that_cannot_be_used_is_refused_each_time_and_read_once(root, monkeypatch):
    write_adapter(root / "large", rank=8)
    folder, opened = DynamicFolder(str(root), "base", max_rank=4), []
    opener = open_served
    monkeypatch.setattr(dynamic_folder, "open_served", lambda *args: opened.append(args) or opener(*args))
    for _ in range(3):
        with pytest.raises(AdapterError, match=r"rank must be at most max_lora_rank \(4\), got 8"):
            find(folder, "large")
    assert len(opened) == 1


def test_names_do_not_fill_the_memory(root, monkeypatch):
    monkeypatch.setattr(dynamic_folder, "MAX_KNOWN", 10)
    folder = DynamicFolder(str(root), "base", max_rank=16)
    for i in range(30):
        assert find(folder, f"name-{i}") is None
    assert len(folder._missing) == 10
