"""Sealed blocks in files."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys

import pytest

from engine.errors import ConfigError, StartupError
from engine.kv_offload.disk import TEMPORARY_KEY, DiskFolder, delete_stale, on_disk
from engine.kv_offload.sealing import OVERHEAD, BlockNames, Sealer, Unsealable, read_key_file

SECRET, NAME, TEXT = b"k" * 32, bytes(range(16)), b"what the user has written " * 40


def opened(root, secret=SECRET, scope="scope") -> DiskFolder:
    return DiskFolder(root, scope, Sealer(secret, scope))


@pytest.fixture
def disk(tmp_path):
    disk = opened(tmp_path)
    disk.write(NAME, memoryview(TEXT))
    yield disk
    disk.close()


def file_of(disk: DiskFolder):
    (file,) = disk.path.glob("??/*")
    return file


def test_a_block_comes_back(disk):
    assert disk.read(NAME) == TEXT


def test_another_start_finds_what_is_there_and_deletes_what_was_not_finished(disk, tmp_path):
    unfinished = file_of(disk).with_suffix(".tmp")
    unfinished.write_bytes(b"half")
    (disk.path / "ab").mkdir()
    (disk.path / "ab" / "somebody else's").write_text("stays")
    disk.close()
    again = opened(tmp_path)
    assert [(block.name, block.size) for block in again.find()] == [(NAME, on_disk(len(TEXT) + OVERHEAD))]
    assert not unfinished.exists()
    disk._lock = again._lock


def test_only_the_owner_can_read_and_nobody_can_read_text(disk):
    file = file_of(disk)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (file.parent, disk.path, disk.path.parent))
    assert b"user" not in file.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], id="a bit"),
        pytest.param(lambda data: b"MKV0" + data[4:], id="another format"),
    ],
)
def test_a_damaged_block_does_not_open(disk, damage):
    file = file_of(disk)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Unsealable):
        disk.read(NAME)


def test_a_block_opens_only_under_its_name_in_its_scope_with_its_key(tmp_path, disk):
    sealed = file_of(disk).read_bytes()
    for sealer, name in (
        (Sealer(SECRET, "scope"), bytes(16)),
        (Sealer(SECRET, "another"), NAME),
        (Sealer(b"x" * 32, "scope"), NAME),
    ):
        with pytest.raises(Unsealable):
            sealer.open(name, sealed)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    disk = opened(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            disk.write(NAME, memoryview(TEXT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(disk.path.glob("??/*"))
    with pytest.raises(OSError, match="No such file"):
        disk.read(NAME)
    disk.close()


def test_engines_of_one_machine_have_folders_of_their_own_until_they_end(tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.kv_offload.disk import DiskFolder\n"
        "print(DiskFolder(Path(sys.argv[1]), 'scope', None).path.name, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "0\n"
    own = opened(tmp_path)
    assert own.path.name == "1"
    other.kill()
    other.wait()
    again = opened(tmp_path)
    assert again.path.name == "0"
    for disk in (own, again):
        disk.close()


def test_what_nobody_will_read_is_deleted(tmp_path):
    def leave(scope: str, age_s: float, close: bool = True):
        disk = opened(tmp_path, scope=scope)
        disk.write(NAME, memoryview(TEXT))
        os.utime(file_of(disk), (0, os.stat(file_of(disk)).st_mtime - age_s))
        if close:
            disk.close()
        return disk

    ended, in_use = leave(f"{TEMPORARY_KEY}1", 0), leave(f"{TEMPORARY_KEY}2", 0, close=False)
    old, young = leave("other model", 100), leave("third model", 1)
    own = opened(tmp_path)
    delete_stale(tmp_path, own.path, ttl_s=50)
    kept = {disk: bool(list(disk.path.glob("??/*"))) for disk in (ended, in_use, old, young)}
    assert kept == {ended: False, in_use: True, old: False, young: True}
    in_use.close()
    own.close()


def test_blocks_of_a_key_that_lives_stay_whoever_starts_first(tmp_path):
    """Ranks of an engine, and engines of other models in the cluster, start again in any order."""
    key, other = f"{TEMPORARY_KEY}a-", f"{TEMPORARY_KEY}b-"
    for scope in (f"{key}rank 1", f"{other}rank 1"):
        disk = opened(tmp_path, scope=scope)
        disk.write(NAME, memoryview(TEXT))
        disk.close()
    first = opened(tmp_path, scope=f"{key}rank 0")
    delete_stale(tmp_path, first.path, ttl_s=None, key=key)
    second = opened(tmp_path, scope=f"{key}rank 1")
    assert [block.name for block in second.find()] == [NAME]
    assert {folder.name for folder in tmp_path.iterdir()} == {f"{key}rank 0", f"{key}rank 1"}
    first.close()
    second.close()


def test_a_folder_that_is_deleted_before_it_is_locked_is_not_used(tmp_path, monkeypatch):
    """Another engine, which deletes what is stale, may be between the two."""
    flock, deleted = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not deleted:
            deleted.append(tmp_path / "scope" / "0")
            shutil.rmtree(deleted[0])
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    disk = opened(tmp_path)
    disk.write(NAME, memoryview(TEXT))
    assert disk.read(NAME) == TEXT
    disk.close()


def test_links_that_others_have_put_into_the_directory_are_not_followed(tmp_path):
    root, private = tmp_path / "root", tmp_path / "private" / "0"
    private.mkdir(parents=True)
    (private / "lock").touch()
    private.chmod(0o750)
    root.mkdir()
    (root / f"{TEMPORARY_KEY}x").symlink_to(private.parent)
    (root / "mine").symlink_to(private.parent)
    with pytest.raises(StartupError, match="it is no folder, so it is not used"):
        opened(root, scope="mine")
    own = opened(root)
    delete_stale(root, own.path, ttl_s=0)
    own.close()
    assert private.is_dir() and stat.S_IMODE(private.stat().st_mode) == 0o750


def test_a_folder_in_which_something_cannot_be_deleted_is_not_kept_locked(tmp_path):
    other = opened(tmp_path, scope="other")
    (other.path / "ab" / "a folder").mkdir(parents=True)
    other.close()
    own = opened(tmp_path)
    delete_stale(tmp_path, own.path, ttl_s=0)
    again = opened(tmp_path, scope="other")
    assert again.path == other.path
    own.close()
    again.close()


def test_names_tell_nothing_without_the_key():
    first, second = BlockNames(SECRET), BlockNames(b"x" * 32)
    names = {first.of(0, NAME), first.of(1, NAME), second.of(0, NAME), NAME}
    assert len(names) == 4
    assert first.of(0, NAME) == BlockNames(SECRET).of(0, NAME)
    assert first.folder("a") != first.folder("b") != second.folder("b")


@pytest.mark.parametrize(
    ("content", "mode", "limit"),
    [
        (b"k" * 31, 0o600, "at least 32 random bytes"),
        (b"k" * 32, 0o640, "only its owner may read"),
        (None, 0, "No such file"),
    ],
)
def test_a_key_file_that_protects_nothing_is_refused(tmp_path, content, mode, limit):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=limit):
        read_key_file(str(file))
