"""What a test can change for those that run after it in the same process, compared before and after it.

Reading costs well below a millisecond, so that every test can afford it: torch is only asked where it is imported, and
/proc only read after something was started.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
REAP_S = 2.0  # for children that are about to end
OWN_VARIABLES = (
    "PYTEST_",
    "KMP_",
    "TORCHINDUCTOR_",
)  # what pytest says of itself, and what torch sets when it compiles
LASTING = "multiprocessing.resource_tracker"  # Python's own, for as long as the process lives
ABSENT = "absent"
State = dict[str, Any]


class Starts:
    """Counts what this process starts, so that nobody need look for children where there can be no new ones."""

    def __init__(self) -> None:
        self.count = 0
        self._known: tuple[int, set[int]] = (0, set())
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: object) -> None:
        if event in STARTS:
            self.count += 1

    def children(self) -> set[int]:
        """Process ids; some may have ended."""
        if self._known[0] != self.count or multiprocessing.active_children():  # which raise no audit event
            count = self.count
            self._known = count, {child.pid for child in psutil.Process().children()}
        return self._known[1]


starts = Starts()


def read_state() -> State:
    state: State = {f"handler of {s.name}": signal.getsignal(s) for s in SIGNALS}
    state["working directory"] = os.getcwd()
    state |= {f"${key}": value for key, value in os.environ.items() if not key.startswith(OWN_VARIABLES)}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_device"):
        state["torch: default dtype"] = torch.get_default_dtype()
        state["torch: gradients"] = torch.is_grad_enabled()
        # a default device is a mode, even if it says what is so without it, and torch.compile then compiles anew
        state["torch: modes (default device)"] = torch._C._len_torch_function_stack()
    return state


def changes(before: State, after: State) -> list[str]:
    """What differs, as `name: before -> after`; torch's own from when it was imported."""
    had_torch = any(name.startswith("torch") for name in before)
    return [
        f"{name}: {before.get(name, ABSENT)} -> {after.get(name, ABSENT)}"
        for name in {**before, **after}
        if before.get(name, ABSENT) != after.get(name, ABSENT) and (had_torch or not name.startswith("torch"))
    ]


def end_children(before: set[int]) -> list[str]:
    """Kill, with all that they have started, children that do not end by themselves. Returns their command lines."""
    deadline = time.monotonic() + REAP_S
    while left := [child for child in psutil.Process().children() if child.pid not in before and command_of(child)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    found = [f"process {child.pid}: {command_of(child)}" for child in left]
    for process in [p for child in left for p in (*descendants(child), child)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return found


def command_of(process: psutil.Process) -> str:
    """Empty for one that has ended, whether it was waited for or not, or that lasts by design."""
    try:
        line = " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    return "" if LASTING in line else line


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def compare(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails what runs between setup and teardown if it leaves anything behind."""
    if "serve" in request.path.parts:  # its servers and Ray's own handlers live as long as the folder's tests
        yield
        return
    before, held = read_state(), starts.children()
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if hasattr(torch, "get_num_threads") else None
    yield
    if num_threads is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)  # which an engine sets for its process, as it should
    problems = changes(before, read_state())
    if starts.children() - held:
        problems += end_children(held)
    if problems:
        pytest.fail("left behind for the next tests:\n  " + "\n  ".join(problems), pytrace=False)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from compare(request)


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from compare(request)
