"""Threads that compile grammars. Clients take turns, and long texts do not delay short ones.

The time for a text grows with its length, so some threads serve only short texts. Both among short and among long
texts, the client whose grammars have taken the least time is served next (engine/fairness/fair_queue.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.errors import Overloaded
from engine.fairness.fair_queue import FairQueue, QueuedRequest

LONG_CHARS = 8_192
MAX_WAITING, MAX_WAITING_CHARS = 256, 16 * 2**20  # grammars, and characters of all their texts
CHARS_PER_S = 300_000  # measured with one long schema on two cores of a virtual AMD EPYC

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    work: Callable[[], T]
    result: Future[T]


class CompileQueue(Generic[T]):
    def __init__(self, num_threads: int):
        """num_threads: number of threads for short texts. For long texts there are half as many in addition."""
        num_long = max(1, num_threads // 2)
        self._short, self._long = (FairQueue(n, MAX_WAITING, MAX_WAITING_CHARS) for n in (num_threads, num_long))
        self._threads = ThreadPoolExecutor(num_threads + num_long, thread_name_prefix="grammar")
        self._jobs: dict[QueuedRequest, _Job[T]] = {}  # waiting jobs
        self._lock = threading.Lock()

    def submit(self, client: str, num_chars: int, work: Callable[[], T]) -> Future[T]:
        """Return a future with the result of `work`. It raises Overloaded if the queue is full."""
        lane = self._long if num_chars > LONG_CHARS else self._short
        queued, job = QueuedRequest(client, 1, num_chars), _Job(work, Future[T]())
        with self._lock:
            dropped = lane.offer(queued)
            refused = [job] if dropped is None else [self._jobs.pop(other) for other in dropped]
            if dropped is not None:
                self._jobs[queued] = job
        for other in refused:
            other.result.set_exception(Overloaded("too many grammars wait to be compiled"))
        self._start(lane)
        return job.result

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, lane: FairQueue) -> None:
        with self._lock:
            started = [(queued, self._jobs.pop(queued)) for queued in lane.start()]
        for queued, job in started:
            self._threads.submit(self._run, lane, queued, job)

    def _run(self, lane: FairQueue, queued: QueuedRequest, job: _Job[T]) -> None:
        job.result.set_running_or_notify_cancel()
        began = time.monotonic()
        try:
            job.result.set_result(job.work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            job.result.set_exception(error)
        finally:
            with self._lock:
                lane.charge(queued, round((time.monotonic() - began) * CHARS_PER_S))
                lane.leave(queued)
            self._start(lane)
