"""What processes leave that end in different ways, found by another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import black_box
from engine.black_box import BlackBox, box_path, compile_key, compute_key, find, found_keys, read_key, remove_orphans

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from engine.black_box import BLACK_BOX
BLACK_BOX.open(Path(sys.argv[1]))
BLACK_BOX.begin("computes done"); BLACK_BOX.end("computes done")
with BLACK_BOX.doing("reads abc"):
    BLACK_BOX.begin("computes one")
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def box(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(black_box, "SHARED_MEMORY", tmp_path)
    return box_path("decode/m#1", 0)


def started(box: Path, end: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + end, str(box)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL])
def test_a_fatal_signal_is_told_from_a_kill_and_leaves_what_was_done(box, number):
    process = started(box, f"os.kill(os.getpid(), {int(number)})")
    process.communicate("go on\n", timeout=60)
    found = find(box)
    assert found is not None and (found.life, found.is_fatal) == ("dead", True)
    assert found.doing == ["computes one"]
    assert "Fatal Python error" in black_box.trace(box)
    assert box.stat().st_mode & 0o777 == 0o600 and box.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_who_is_killed_from_outside_has_no_fatal_signal(box, number):
    process = started(box)
    process.send_signal(number)
    process.communicate(timeout=60)
    found = find(box)
    assert found is not None and (found.life, found.is_fatal) == ("dead", False)


def test_who_is_stopped_is_told_from_who_runs(box):
    process = started(box)
    found = find(box)
    assert found is not None and found.life == "alive"
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    found = find(box)
    assert found is not None and found.life == "stopped"
    remove_orphans(box.parent)
    assert find(box) is not None, "its process may go on"
    process.kill()
    process.communicate(timeout=60)
    remove_orphans(box.parent)
    assert not list(box.parent.iterdir())


def test_entries_are_found_by_their_keys_however_long(box):
    mine, long = BlackBox(), compute_key("é" * 500)
    mine.open(box)
    for key in (read_key("abc"), compile_key("regex", "a+"), long):
        mine.begin(key)
    found = find(box)
    assert found is not None
    assert found_keys(found.doing, [long, read_key("abc"), compute_key("é" * 499)]) == [long, read_key("abc")]
    assert found_keys(found.doing, [compile_key("grammar", "a+"), compile_key("regex", "a+")]) == [
        compile_key("regex", "a+")
    ]
    mine.close()
    assert not list(box.parent.iterdir())


def test_many_threads_begin_and_end_and_what_does_not_fit_is_missing(box):
    mine = BlackBox()
    mine.open(box)

    def work(thread: int) -> None:
        for i in range(500):
            with mine.doing(compute_key(f"{thread}-{i}")):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for i in range(black_box.SLOTS + 10):
        mine.begin(compute_key(str(i)))
    found = find(box)
    assert found is not None and len(found.doing) == black_box.SLOTS
    mine.close()


def test_a_folder_that_others_can_use_is_not_used(box):
    box.parent.mkdir(mode=0o777)
    box.parent.chmod(0o777)
    with pytest.raises(PermissionError):
        BlackBox().open(box)
    assert find(box) is None


def test_a_process_without_a_box_records_nothing():
    mine = BlackBox()
    with mine.doing("computes one"):
        mine.end("computes two")
    mine.close()
