"""What is left of the tapes of engines that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.parts.tape import shared_copy
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.file import read_tapes
from engine.parts.tape.kept_tapes import KeptTapes
from engine.parts.tape.shared_copy import (
    SHARED_MEMORY,
    keep_copies_of,
    keep_orphans,
    open_copy,
    remove_copies_of,
)
from engine.wire.block_hash import block_hashes
from tests.engine.parts.tape.taped import attach, replay_whole
from tests.fake_runner import Harness

NOON = 1_800_014_400
PROMPT = list(range(1, 40))
HALF = [*PROMPT[:20], *[7] * 19]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def kept(tmp_path) -> KeptTapes:
    return KeptTapes(tmp_path / "kept", 3)


def harness_in(root: Path, kept: KeptTapes) -> Harness:
    harness = Harness(num_blocks=64, max_model_len=120)
    harness.tape = attach(harness, shared_root=root, kept=kept)
    return harness


def work(harness: Harness, name: str = "a", steps: int = 5, prompt: list[int] = PROMPT) -> None:
    harness.add(name, prompt, max_tokens=50)
    for _ in range(steps):
        harness.step()


VICTIM = """
import sys, time
from pathlib import Path
from engine.parts.tape.kept_tapes import KeptTapes
from tests.engine.parts.tape.test_shared_copy import HALF, harness_in, work

root, kept = map(Path, sys.argv[1:])
harness = harness_in(root, KeptTapes(kept, 3))
work(harness)
work(harness, "b", prompt=HALF)
print("ready", flush=True)
time.sleep(600)
"""


def test_the_tape_of_a_killed_process_is_kept_in_its_own_folder_by_the_next_engine_and_replays(root, kept, caplog):
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(root), str(kept.folder)], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout.readline() == "ready\n"
    keep_orphans(root)
    assert not kept.folder.exists(), "its process lives"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    (copy,) = root.iterdir()
    for number, written in enumerate(sorted(copy.iterdir())):
        os.utime(written, (0, NOON - number))
    keep_orphans(root)
    (file,) = kept.folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    (tape,) = read_tapes(file)
    assert tape.reason == "a process of the engine was killed or crashed after 2027-01-15 12:00:00 UTC"
    assert f"the tape of e is kept, because {tape.reason}: `manta replay {file}`" in caplog.text
    found = replay_whole(tape)
    assert [request.request_id for request in found.scheduler.queue.running] == ["a", "b"]
    assert found.scheduler.totals.prefix_hit_tokens == 20
    assert block_hashes(PROMPT, 4)[:16] not in file.read_bytes() + msgspec.msgpack.encode(tape)
    assert list(root.iterdir()) == []


def test_an_engine_that_hangs_has_its_tape_kept_by_its_replica(root, kept, caplog):
    harness = harness_in(root, kept)
    work(harness)
    keep_copies_of(["another"], "no step", root)
    assert not kept.folder.exists()
    keep_copies_of(["e"], "no step ended for 11 s", root)
    (tape,) = read_tapes(*kept.folder.iterdir())
    assert tape.reason == "no step ended for 11 s"
    assert "the tape of e is kept, because no step ended for 11 s: `manta replay " in caplog.text
    assert replay_whole(tape).scheduler.totals.steps == harness.scheduler.totals.steps
    harness.tape.close()


@pytest.mark.parametrize("end", ["engine", "replica"])
def test_an_engine_that_ends_as_it_should_leaves_nothing(root, kept, end):
    harness = harness_in(root, kept)
    work(harness)
    if end == "engine":
        harness.tape.close()
    else:
        remove_copies_of(["e"], root)
    assert list(root.iterdir()) == []
    work(harness, "later")
    harness.tape.close()


def test_engines_of_a_process_may_have_the_same_name(root, kept):
    one, other = harness_in(root, kept), harness_in(root, kept)
    one.tape.close()
    assert len(list(root.iterdir())) == 1
    other.tape.close()
    assert list(root.iterdir()) == []


def test_only_the_newest_tapes_are_kept(root, kept):
    for number in range(5):
        harness = harness_in(root, kept)
        work(harness, str(number))
        keep_copies_of(["e"], str(number), root)
        harness.tape.close()
    assert sorted(read_tapes(file)[0].reason for file in kept.folder.iterdir()) == ["2", "3", "4"]


def test_tapes_of_late_tokens_do_not_push_out_that_of_a_failure(kept):
    tape = EngineTape(engine_id="e", version="v", wall_s=0.0, role="", segments=[])
    failed = kept.keep(msgspec.structs.replace(tape, cause="failed"))
    late = [kept.keep(msgspec.structs.replace(tape, cause="late")) for _ in range(5)]
    assert set(kept.folder.iterdir()) == {failed, *late[2:]}


def test_without_room_in_shared_memory_the_copy_ends_and_the_engine_goes_on(root, kept, monkeypatch, caplog):
    harness = harness_in(root, kept)
    work(harness)

    def full(file: int, data: bytes) -> int:
        return 0

    monkeypatch.setattr(os, "write", full)
    work(harness, "b")
    monkeypatch.undo()
    assert list(root.iterdir()) == []
    assert "it will be lost if the engine is killed" in caplog.text
    work(harness, "c")
    assert replay_whole(msgspec.msgpack.decode(harness.tape.take(), type=EngineTape)).scheduler.totals.steps


def test_nothing_is_written_where_others_can_read(root, kept, caplog):
    head = EngineTape(engine_id="e", version="", wall_s=0.0, role="", segments=[])
    root.chmod(0o755)
    assert type(open_copy(head, root, kept)) is shared_copy.NoCopy
    link = root / "link"
    link.symlink_to(tempfile.gettempdir())
    assert type(open_copy(head, link, kept)) is shared_copy.NoCopy
    assert caplog.text.count("so it is not used") == 2


def test_a_file_that_was_being_written_is_read_as_far_as_it_is_whole(root, kept):
    harness = harness_in(root, kept)
    work(harness)
    (folder,) = root.iterdir()
    newest = max(file for file in folder.iterdir() if file.name.isdecimal())
    with newest.open("ab") as file:
        file.write(b"\1\xff\0\0\0half")
    assert replay_whole(shared_copy.read_copy(folder, "").tape).scheduler.totals.steps == harness.scheduler.totals.steps
    harness.tape.close()


def test_a_tape_is_kept_while_another_engine_removes_old_ones(kept):
    kept.folder.mkdir()
    (kept.folder / "asked-removed.tape").symlink_to("nothing")  # is found, but cannot be looked at any more
    path = kept.keep(EngineTape(engine_id="e", version="v", wall_s=0.0, role="", segments=[]))
    assert [tape.engine_id for tape in read_tapes(path)] == ["e"]
