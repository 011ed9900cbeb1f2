"""What all tests share: their order and processes, what hypothesis tries, what may be left behind, and models."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import zlib
from collections.abc import Callable, Collection, Generator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.scenarios import run

FOLDER = Path(__file__).parent
pytest_plugins = ["tests.left_behind", "tests.unchanged"]

# what hypothesis tries is the same in every run but those of `make test-all`, and no test fails because it was slow
settings.register_profile(
    "manta",
    derandomize="TEST_SEED" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("manta")


def pytest_addoption(parser: pytest.Parser) -> None:
    message = "Fail a test without the mark `slow` that takes more CPU time, with its children, than that."
    parser.addoption("--max-call-s", type=float, metavar="SECONDS", help=message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with a tokenizer."""
    from tests.models import make_model

    return make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a small model of a family, without a tokenizer."""
    from tests.models import made_once

    return made_once(tmp_path_factory)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine. The fixture `api` is entered in its loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def test() -> None:
        async with given.get("api", nullcontext()) as api:
            await pyfuncitem.obj(**{**given, **({"api": api} if "api" in given else {})})

    run(test())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """With --max-call-s, fail a test that is too slow for `make test`. Never in CI, whose machines differ."""
    before, most_s = os.times(), item.config.getoption("--max-call-s")
    result = yield
    took_s = sum(os.times()[:4]) - sum(before[:4])
    if most_s is not None and took_s > most_s and not item.get_closest_marker("slow"):
        pytest.fail(f"took {took_s:.1f} s of CPU time: mark it slow, or make it shorter", pytrace=False)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Give a process of `pytest -n`, and what it starts, one thread for each operation: there are no more cores."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def import_other_files_first(number: int, processes: int, left_out: Collection[Path]) -> None:
    """Import the test files, each process of `pytest -n` beginning elsewhere.

    To rewrite the assertions of a file takes time until its bytecode is kept. In a fresh clone all processes would come
    to the same file at the same time.
    """
    own = [FOLDER / "clients", FOLDER / "browser"]  # folders with make targets of their own
    files, firsts = (
        [file for file in sorted(FOLDER.rglob(name)) if file not in left_out and not {*own} & {*file.parents}]
        for name in ("test_*.py", "conftest.py")
    )
    start = len(files) * number // processes
    for file in [*firsts, *files[start:], *files[:start]]:
        with suppress(Exception, pytest.skip.Exception):  # which collecting it reports
            importlib.import_module(".".join(file.relative_to(FOLDER.parent).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Keep a million objects, of modules and of tests, from the garbage collector, which would search them all at every
    turn: a tenth of the time of most tests. Keep loggers that libraries have cut off from pytest's search, too: 2 ms a
    test."""
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is not None and [Path(arg).resolve() for arg in session.config.args] == [FOLDER]:
        from tests.unchanged import UNCHANGED  # pytest rewrites its plugins before anything imports them

        left_out = session.config.stash.get(UNCHANGED, frozenset())
        import_other_files_first(int(worker["workerid"].removeprefix("gw")), worker["workercount"], left_out)
    try:
        return (yield)
    finally:
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True  # else pytest adds its handlers to each of 60, six times a test
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With TEST_SEED, files come in an order of that seed, the same in every process of `pytest -n`. There, tests that
    wait for clusters come first (tests/by_server.py), so that at the end no process waits for another."""
    if seed := os.environ.get("TEST_SEED"):
        items.sort(key=lambda item: zlib.crc32(f"{seed} {item.path.name} {item.path.parent.name}".encode()))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("serve") is None)


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of `pytest -n auto`: one for each core, and two that wait for clusters and for
    processes of tests. Each takes a GiB, and imports and collects everything."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 2, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.by_server import ByServer

    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None
