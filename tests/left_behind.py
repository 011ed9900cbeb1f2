"""What a test can change for those that run after it in the same process, compared before and after it.

A look costs well below a millisecond, so that every test can afford two: torch is only asked where it is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from tests.processes import outlives_test

try:
    import zmq
except ImportError:  # a CUDA image (docs/gpu.md)
    zmq = None  # type: ignore[assignment]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
END_S = 30.0  # for what is about to end
OWN_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")  # of pytest, and of torch when it compiles
LASTING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Processes that Python and torch start once, for as long as this one lives."""
ABSENT = "absent"
State = dict[str, Any]

contexts: list[Any] = []
"""Contexts of ZMQ that were not closed when last looked at."""
left_contexts: list[Any] = []
"""Contexts of tests that failed here. With messages that nobody takes, the garbage collector would wait for ever to
close them, in whichever test comes to it."""

if zmq is not None:
    make_context = zmq.Context.__init__

    def keep_context(self: Any, *args: Any, **options: Any) -> None:
        make_context(self, *args, **options)
        if not self._shadow:
            contexts.append(self)

    zmq.Context.__init__ = keep_context  # type: ignore[assignment, method-assign]


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


def read_children(pid: int | str = "self") -> set[int]:
    """Process ids; some may have ended."""
    found: set[int] = set()
    with suppress(FileNotFoundError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:  # a thread may end
                found.update(map(int, children.read().split()))
    return found


def read_contexts() -> set[Any]:
    contexts[:] = [context for context in contexts if not context.closed]
    return {context for context in contexts if context is not type(context)._instance}


def end_children(before: set[int]) -> list[str]:
    """Kill, with all that they have started, children that do not end by themselves. Returns their command lines."""
    deadline = time.monotonic() + END_S
    while left := {pid: command for pid in read_children() - before if (command := command_of(pid))}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        kill(pid)
    return [f"process {pid}: {command}" for pid, command in left.items()]


def command_of(pid: int) -> str:
    """Empty for one that has ended, whether it was waited for or not, or that lasts by design.

    A process that has just been started may have no command line yet: its name stands for it.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as cmdline:
            name, state = stat.read().split("(", 1)[1].rsplit(")", 1)
            line = cmdline.read().replace("\0", " ").strip() or name
    except OSError:
        return ""
    ended = state.split()[0] in "ZX"
    return "" if ended or any(name in line for name in LASTING) else line


def kill(pid: int) -> None:
    children = read_children(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill(child)


def compare(request: pytest.FixtureRequest, may_stay: Collection[Any] = ()) -> Iterator[None]:
    """Fails what runs between setup and teardown if it leaves anything behind. may_stay: process ids and contexts."""
    if request.node.get_closest_marker("serve"):  # their servers and Ray's own handlers live longer
        yield
        return
    before, children, sockets = read_state(), read_children(), read_contexts()
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if hasattr(torch, "get_num_threads") else None
    yield
    if num_threads is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)  # which an engine sets for its process, as it should
    problems = changes(before, read_state())
    if read_children() - children.union(may_stay):
        problems += end_children(children.union(may_stay))
    if unclosed := read_contexts() - sockets.union(may_stay):
        left_contexts.extend(unclosed)
        contexts[:] = [context for context in contexts if context not in unclosed]
        problems += [f"{context} was not closed" for context in unclosed]
    if problems:
        pytest.fail("left behind for the next tests:\n  " + "\n  ".join(problems), pytrace=False)


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, end)


def end(*_: object) -> NoReturn:
    """Exit as Ctrl-C does: what tests have started is still ended."""
    pytest.exit("SIGTERM", returncode=128 + signal.SIGTERM)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from compare(request, outlives_test)


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from compare(request)
