"""Queue of one model in one ingress, before the engines' own queues.

Engines get only as many sequences as they can run and a few more, so that they never idle. The ingress knows the
clients, so it chooses the next request (engine/fairness/fair_queue.py). With several ingresses, each gets an equal part
of the engines' capacity and shares it fairly among its own clients. So a client that reaches only one ingress is
limited to the part of that ingress.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.frontend.availability import Availability
from deployments.observability.stats import ModelStats
from deployments.replicas.pools import EnginePool
from engine.errors import EngineUnavailable, Overloaded, RequestTimeout
from engine.fairness.fair_queue import FairQueue, QueuedRequest
from engine.wire.messages import EngineStatus

POLL_INTERVAL_S = 1.0  # between polls of the engines, while they work for this ingress or are down
CROWDED = 0.8  # fraction of KV blocks in use above which waiting requests are assumed to wait for blocks
MAX_DURATIONS = 64  # newest requests over whose durations Retry-After is averaged
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits on the sequences that one ingress sends to a model's engines, and on the sequences that wait in the
    ingress."""

    max_num_seqs: int
    """Maximum number of sequences that one engine runs."""
    num_engines: int
    """Number of engines to assume before any of them has reported."""
    num_ingresses: int
    """Number of ingresses that send to the same engines."""
    max_waiting: int
    """Maximum number of sequences that wait in one ingress."""
    max_waiting_tokens: int
    """Maximum number of prompt tokens of the sequences that wait in one ingress."""


class Admission:
    """Makes the requests of one model wait until the engines have capacity for them."""

    def __init__(self, pool: EnginePool, limits: AdmissionLimits, stats: ModelStats, availability: Availability):
        self.stats, self.availability = stats, availability
        self.num_engines = limits.num_engines  #: number of engines at the last report
        self._pool, self._limits = pool, limits
        window = _per_ingress(limits.num_engines * _engine_capacity(limits), limits)
        self._queue = FairQueue(window, limits.max_waiting, limits.max_waiting_tokens)
        self._starts: dict[QueuedRequest, asyncio.Future[None]] = {}
        self._durations_s: deque[float] = deque([1.0], maxlen=MAX_DURATIONS)
        self._watch: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of sequences in this queue."""
        return self._queue.num_waiting

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting sequences."""
        return self._queue.waiting_tokens

    @property
    def num_running(self) -> int:
        """Number of this ingress's sequences that are in the engines."""
        return self._queue.num_running

    def check(self, client: str) -> None:
        """Raise Overloaded if a request of this client would be refused. Call it before doing any work for the
        request."""
        if self._queue.is_full_for(client):
            raise self._overloaded()

    @asynccontextmanager
    async def enter(
        self, request_id: str, client: str, sequences: int, prompt_tokens: int, timeout_s: float | None
    ) -> AsyncGenerator[QueuedRequest]:
        """Wait until the engines have capacity. Raises Overloaded or RequestTimeout."""
        loop = asyncio.get_running_loop()
        queued, started = QueuedRequest(client, sequences, prompt_tokens), loop.create_future()
        dropped = self._queue.offer(queued)
        if dropped is None:
            raise self._overloaded()
        self._starts[queued] = started
        for other in dropped:
            if not (refused := self._starts.pop(other)).done():  # done if its client has just left
                refused.set_exception(self._overloaded())
        self._start()
        try:
            await _wait(started, request_id, timeout_s)
            started_at = loop.time()
            yield queued
            self._durations_s.append(loop.time() - started_at)
        finally:
            self._starts.pop(queued, None)
            self._queue.leave(queued)
            self._start()

    def charge(self, queued: QueuedRequest, output_tokens: int) -> None:
        """Count output tokens against the client of a running request."""
        self._queue.charge(queued, output_tokens)

    def settle(self, queued: QueuedRequest, seconds: float) -> None:
        """Charge a request that has just ended with the time of the engines that it has taken, instead of tokens."""
        self._queue.settle(queued, seconds)

    def _start(self) -> None:
        """Start the requests that may run now. Called after every change of the queue."""
        for queued in self._queue.start():
            if not (started := self._starts.pop(queued)).done():  # done if it has just been cancelled
                started.set_result(None)
        self.stats.waiting = self.num_waiting
        if self._queue.num_running and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._watch_engines())

    async def _watch_engines(self) -> None:
        """Adjust the window to the engines' reports, as long as this ingress has sequences in the engines.

        While all engines are down, keeps polling even without running requests, unless the engines are scaled to zero.
        """
        while self._queue.num_running or (self.availability.is_down and not await self._pool.asleep()):
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                statuses = [status for status in await self._pool.statuses() if status.role != "prefill"]
            except EngineUnavailable:  # keep the window: requests that are sent get the error
                self.availability.report_down()
                continue
            self.availability.report_up()
            self.num_engines, self._queue.window = len(statuses), window(statuses, self._limits)
            self._start()

    def _overloaded(self) -> Overloaded:
        self.stats.refused += 1
        message = f"{self.num_waiting} sequences are waiting, and the limit is {self._limits.max_waiting} sequences"
        message += f" and {self._limits.max_waiting_tokens} prompt tokens"
        return Overloaded(message, self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Return the seconds until the present queue will have been served, if requests take as long as recent requests
        did."""
        mean_s = sum(self._durations_s) / len(self._durations_s)
        return min(max(mean_s * self.num_waiting / self._queue.window, 1.0), MAX_RETRY_AFTER_S)


async def _wait(started: asyncio.Future[None], request_id: str, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await started
    except TimeoutError:
        raise RequestTimeout(request_id, timeout_s or 0.0) from None


def window(statuses: Sequence[EngineStatus], limits: AdmissionLimits) -> int:
    """Return how many sequences one ingress may have in the engines.

    Each engine contributes the maximum that it can run, plus a few to start next. An engine whose requests wait for KV
    blocks contributes only the sequences that it currently runs, plus the same few to start next.
    """
    headroom, total = _headroom(limits), 0
    for stats in (status.stats for status in statuses):
        crowded = stats.waiting > headroom and stats.blocks_used > CROWDED * stats.blocks_total
        total += stats.running + headroom if crowded else _engine_capacity(limits)
    return _per_ingress(total, limits)


def _headroom(limits: AdmissionLimits) -> int:
    return max(1, limits.max_num_seqs // 8)


def _engine_capacity(limits: AdmissionLimits) -> int:
    return limits.max_num_seqs + _headroom(limits)


def _per_ingress(sequences: int, limits: AdmissionLimits) -> int:
    return max(1, math.ceil(sequences / limits.num_ingresses))
