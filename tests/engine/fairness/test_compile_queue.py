"""Whose grammar is compiled next. Each piece of work waits until the test lets it end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from engine.errors import Overloaded
from engine.fairness import compile_queue
from engine.fairness.compile_queue import LONG_CHARS, CompileQueue

LIMIT_S = 60.0
LONG = LONG_CHARS + 1


class Works:
    """Pieces of work by their names, and the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def __call__(self, name: str) -> Callable[[], str]:
        gate = self._gates[name] = threading.Event()

        def work() -> str:
            self.began.append(name)
            assert gate.wait(LIMIT_S)
            return name

        return work

    def end(self, *names: str) -> None:
        for name in names or self._gates:
            self._gates[name].set()


@pytest.fixture
def works() -> Iterator[Works]:
    works = Works()
    yield works
    works.end()


@pytest.fixture
def queue() -> Iterator[CompileQueue[str]]:
    queue = CompileQueue[str](1)
    yield queue
    queue.close()


def test_a_short_text_waits_for_no_long_one_even_of_its_own_client(queue, works):
    long = [queue.submit("a", LONG, works(f"long {i}")) for i in range(20)]
    short = queue.submit("a", 20, lambda: "short")
    assert short.result(LIMIT_S) == "short" and not any(future.done() for future in long)


@pytest.mark.parametrize("chars", [20, LONG])
def test_a_client_waits_for_one_text_of_another_not_for_all(queue, works, chars):
    names = [f"a{i}" for i in range(6)]
    many = [queue.submit("a", chars, works(name)) for name in names]
    one = queue.submit("b", chars, works("b"))
    works.end("b", "a0")
    assert one.result(LIMIT_S) == "b" and works.began[:2] == ["a0", "b"]
    works.end()
    assert [future.result(LIMIT_S) for future in many] == names and works.began == ["a0", "b", *names[1:]]


def test_more_than_may_wait_is_refused_at_the_expense_of_who_sends_it(queue, works, monkeypatch):
    monkeypatch.setattr(compile_queue, "MAX_WAITING", 4)
    queue = CompileQueue[str](1)
    flood = [queue.submit("a", 20, works(f"a{i}")) for i in range(8)]
    other = queue.submit("b", 20, works("b"))
    works.end()
    assert other.result(LIMIT_S) == "b"
    assert sum(isinstance(future.exception(LIMIT_S), Overloaded) for future in flood) == 4
    queue.close()


def test_work_that_fails_ends_as_its_error_and_lets_the_next_begin(queue):
    def fail() -> str:
        raise ValueError("no")

    failed, after = queue.submit("a", 5, fail), queue.submit("a", 5, lambda: "after")
    assert after.result(LIMIT_S) == "after" and isinstance(_error(failed), ValueError)


def _error(future: Future[str]) -> BaseException | None:
    return future.exception(LIMIT_S)
