"""Sealed blocks in a folder or object store that engines share."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from engine.errors import ConfigError, StartupError
from engine.kv_offload.disk import TEMPORARY_KEY
from engine.kv_offload.sealing import OVERHEAD, Sealer, Unsealable
from engine.kv_offload.store import DEAD_S, UNFINISHED_S, StoreFolder, Unreachable
from engine.wire.parts.kv_offload import StoreListing

SECRET, TEXT = b"k" * 32, b"what the user has written " * 40
NAMES = [bytes([number] * 16) for number in range(4)]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a real server, if s3fs and moto are installed."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "a", "secret": "b"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", options)  # as FSSPEC_S3_ENDPOINT_URL and so on do
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "store")
    elif request.param == "memory":
        yield "memory://store"
        fsspec.filesystem("memory").store.clear()
    else:
        yield f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def opened(url: str, scope: str = "scope", rank: int = 0, ranks: int = 1, secret: bytes = SECRET) -> StoreFolder:
    return StoreFolder(url, scope, Sealer(secret, f"{scope} {rank}"), rank=rank, ranks=ranks)


def names_of(listing: StoreListing) -> tuple[set[bytes], set[bytes]]:
    return {block.name for block in listing.added}, set(listing.removed)


def aged(store: StoreFolder, monkeypatch, seconds: float) -> None:
    now = time.time()
    monkeypatch.setattr("engine.kv_offload.store.time.time", lambda: now + seconds)


def test_a_store_to_which_nobody_has_written_is_empty(url):
    store = opened(url)
    assert store.list() == StoreListing([], [])
    store.delete_stale(60.0, "")
    store.delete([NAMES[0]])


def test_what_one_has_written_others_read_until_it_is_deleted(url):
    one, other = opened(url), opened(url)
    one.write(NAMES[0], memoryview(TEXT))
    (found,) = other.list().added
    assert (found.name, found.size) == (NAMES[0], len(TEXT) + OVERHEAD) and found.age_s < 60
    assert other.read(NAMES[0]) == TEXT
    other.delete([NAMES[0], NAMES[1]])
    assert names_of(one.list()) == (set(), {NAMES[0]})
    with pytest.raises(FileNotFoundError):
        one.read(NAMES[0])
    assert names_of(other.list()) == (set(), {NAMES[0]})
    assert names_of(other.list()) == (set(), set())


def test_an_engine_with_another_model_or_key_sees_nothing(url):
    opened(url).write(NAMES[0], memoryview(TEXT))
    assert names_of(opened(url, "other scope").list()) == (set(), set())
    with pytest.raises(Unsealable):
        opened(url, secret=b"x" * 32).read(NAMES[0])


def test_a_block_counts_once_all_ranks_have_written_their_part(url, monkeypatch):
    first, second = (opened(url, rank=rank, ranks=2) for rank in range(2))
    reader = opened(url, ranks=2)
    first.write(NAMES[0], memoryview(TEXT))
    second.write(NAMES[0], memoryview(TEXT))
    second.write(NAMES[1], memoryview(TEXT))
    assert names_of(reader.list()) == ({NAMES[0]}, set())
    first.write(NAMES[2], memoryview(TEXT))
    assert names_of(first.list()) == (set(), set()), "what another rank is writing is not gone"
    assert second.read(NAMES[0]) == TEXT
    aged(reader, monkeypatch, UNFINISHED_S + 60)
    reader.list()
    with pytest.raises(FileNotFoundError):
        second.read(NAMES[1])
    reader.delete([NAMES[0]])
    with pytest.raises(FileNotFoundError):
        second.read(NAMES[0])


def test_what_nobody_will_read_is_deleted(url, monkeypatch):
    lost, keyed, kin = f"{TEMPORARY_KEY}bb-{1:016x}", f"{2:016x}", f"{TEMPORARY_KEY}aa-{3:016x}"
    own = opened(url, f"{TEMPORARY_KEY}aa-{4:016x}")
    scopes = {name: opened(url, name) for name in (lost, keyed, kin)}
    for store in (own, *scopes.values()):
        store.write(NAMES[0], memoryview(TEXT))

    def left() -> set[str]:
        return {name for name in scopes if names_of(opened(url, name).list())[0]}

    own.delete_stale(None, f"{TEMPORARY_KEY}aa-")
    assert left() == set(scopes)
    aged(own, monkeypatch, DEAD_S + 60)
    own.delete_stale(None, f"{TEMPORARY_KEY}aa-")
    assert left() == {kin, keyed}
    own.delete_stale(60.0, f"{TEMPORARY_KEY}aa-")
    assert left() == set()
    assert own.read(NAMES[0]) == TEXT


def test_old_files_that_are_no_blocks_stay_in_the_store(tmp_path, monkeypatch):
    store, other = opened(str(tmp_path)), f"{5:016x}"
    opened(str(tmp_path), other).write(NAMES[0], memoryview(TEXT))
    files = ["thesis/draft.tex", f"thesis/00/{NAMES[0].hex()}.0", f"{TEMPORARY_KEY}notes/a", f"{other}/notes.txt"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("not a block")
    aged(store, monkeypatch, DEAD_S + 60)
    store.delete_stale(60.0, "")
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()} == set(files)


def test_folders_of_which_nothing_can_be_stale_are_not_listed(tmp_path, monkeypatch):
    store = opened(str(tmp_path))
    opened(str(tmp_path), f"{5:016x}").write(NAMES[0], memoryview(TEXT))
    listed: list[str] = []
    monkeypatch.setattr(store._files, "find", lambda path, **kwargs: listed.append(path) or {})
    store.delete_stale(None, "")
    assert listed == []
    store.delete_stale(60.0, "")
    assert len(listed) == 1


def test_a_damaged_object_does_not_open(tmp_path):
    store = opened(str(tmp_path))
    store.write(NAMES[0], memoryview(TEXT))
    (file,) = tmp_path.glob("scope/??/*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and b"user" not in file.read_bytes()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Unsealable):
        store.read(NAMES[0])


def test_files_that_are_not_finished_or_not_ours_are_no_blocks(tmp_path):
    store = opened(str(tmp_path))
    store.write(NAMES[0], memoryview(TEXT))
    folder = tmp_path / "scope" / "00"
    young, old = folder / f"{NAMES[1].hex()}.1.tmp", folder / f"{NAMES[1].hex()}.2.tmp"
    for file in (young, old, folder / "README"):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert names_of(store.list()) == (set(), set()), "its own block is known"
    assert {file.name for file in folder.iterdir()} == {f"{NAMES[0].hex()}.0", young.name, "README"}


def test_a_store_that_does_not_answer_is_told_apart_from_a_block_that_is_not_there(monkeypatch):
    store = opened("memory://store")

    def away(*args, **kwargs):
        raise ConnectionError("the network is down")

    for method in ("cat_file", "pipe_file", "find", "rm_file"):
        monkeypatch.setattr(type(store._files), method, away)
    for call in (
        lambda: store.read(NAMES[0]),
        lambda: store.write(NAMES[0], memoryview(TEXT)),
        store.list,
        lambda: store.delete(NAMES),
    ):
        with pytest.raises(Unreachable, match="ConnectionError: the network is down"):
            call()


def test_a_store_that_cannot_be_opened_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="a URL that fsspec can open"):
        opened("no-such-scheme://bucket")
    with pytest.raises(StartupError, match=r"ftp://\*\*\*@localhost:1/kv cannot be opened"):
        opened("ftp://me:hunter2@localhost:1/kv")
    Path(tmp_path, "file").touch()
    with pytest.raises(StartupError, match="cannot be written"):
        opened(str(tmp_path / "file" / "folder"))


def test_messages_name_a_store_without_its_password():
    assert opened("memory://me:hunter2@store").url == "memory://***@store"
