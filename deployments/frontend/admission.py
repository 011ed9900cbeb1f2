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
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from deployments.frontend.availability import Availability
from deployments.frontend.calibration import Calibration, ForecastRequest
from deployments.frontend.first_token import LIMIT_HEADER, FirstTokenDeadline, FirstTokenLate
from deployments.frontend.latency_forecast import LatencyForecast
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
        #: called with a request's seconds to its first token, and the loop's time
        self.first_token_observers: list[Callable[[float, float], None]] = []
        self._pool, self._limits = pool, limits
        window = _per_ingress(limits.num_engines * _engine_capacity(limits), limits)
        self._queue = FairQueue(window, limits.max_waiting, limits.max_waiting_tokens)
        self._starts: dict[QueuedRequest, asyncio.Future[None]] = {}
        self._durations_s: deque[float] = deque([1.0], maxlen=MAX_DURATIONS)
        self._watch: asyncio.Task[None] | None = None
        self.forecast = LatencyForecast()  #: costs and load of the engines at the last report
        self._calibration = Calibration(stats)
        self._forecasts: dict[QueuedRequest, ForecastRequest] = {}  # of running requests
        self._uncomputed_tokens = 0  # prompt tokens of running requests without a token

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
        self,
        request_id: str,
        client: str,
        sequences: int,
        prompt_tokens: int,
        timeout_s: float | None,
        deadline: FirstTokenDeadline | None = None,
    ) -> AsyncGenerator[QueuedRequest]:
        """Wait until the engines have capacity. Raises Overloaded or RequestTimeout; FirstTokenLate if the first token
        would probably come too late.

        deadline: that of the first token; None for requests without tokens.
        """
        loop = asyncio.get_running_loop()
        queued, started = QueuedRequest(client, sequences, prompt_tokens), loop.create_future()
        forecast = self._expect(prompt_tokens, loop.time())
        if deadline is not None:
            self._check_deadline(deadline, forecast, timeout_s)
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
            self._forecasts[queued] = forecast
            self._uncomputed_tokens += prompt_tokens
            yield queued
            self._durations_s.append(loop.time() - started_at)
        finally:
            if self._forecasts.pop(queued, None) is not None and forecast.first_at is None:
                self._uncomputed_tokens -= prompt_tokens
            if forecast.first_at is not None:
                for observe in self.first_token_observers:
                    observe(forecast.first_at - forecast.asked_at, loop.time())
            if deadline is not None:
                self._calibration.ended(forecast, loop.time(), one_sequence=sequences == 1)
            self._starts.pop(queued, None)
            self._queue.leave(queued)
            self._start()

    def charge(self, queued: QueuedRequest, output_tokens: int) -> None:
        """Count output tokens against the client of a running request."""
        self._queue.charge(queued, output_tokens)
        if output_tokens:
            forecast = self._forecasts[queued]
            if forecast.first_at is None:
                self._uncomputed_tokens -= queued.prompt_tokens
            forecast.add(output_tokens, asyncio.get_running_loop().time())

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
                found, peers = await asyncio.gather(self._pool.statuses(), self._pool.peer_statuses())
            except EngineUnavailable:  # keep the window: requests that are sent get the error
                self.availability.report_down()
                continue
            self.availability.report_up()
            statuses = [status for status in found if status.role != "prefill"]
            prefill = [*peers.get("prefill", []), *(status for status in found if status.role == "prefill")]
            self.forecast = LatencyForecast.of([s.stats for s in statuses], [s.stats for s in prefill])
            self.num_engines, self._queue.window = len(statuses), window(statuses, self._limits)
            self._start()
        self.forecast = replace(self.forecast, queued_tokens=0)  # by the next request, that is long computed

    def _expect(self, prompt_tokens: int, now: float) -> ForecastRequest:
        """Return what a request would take that came now."""
        queue = self._queue
        waits = queue.num_waiting > 0 or queue.num_running >= queue.window
        first_token_s = self.forecast.first_token_s(prompt_tokens, self._uncomputed_tokens)
        if first_token_s is not None and waits:
            first_token_s += self._mean_duration_s() * (queue.num_waiting + 1) / queue.window
        per_token_s = self.forecast.per_token_s(queue.num_running)
        return self._calibration.tell(now, first_token_s, per_token_s, waits=waits)

    def _check_deadline(self, deadline: FirstTokenDeadline, forecast: ForecastRequest, timeout_s: float | None) -> None:
        """Raise FirstTokenLate if the first token would probably come too late. A request that finds the engines idle
        is never refused: it would not be served sooner later on."""
        if forecast.first_token is None or math.isinf(bound_s := forecast.first_token.bound_s):
            return
        waited_s = forecast.asked_at - deadline.asked_at
        deadline.bound_s = waited_s + bound_s
        by_header = deadline.left_s(forecast.asked_at) <= (math.inf if timeout_s is None else timeout_s)
        limit_s = deadline.limit_s if by_header or timeout_s is None else waited_s + timeout_s
        if deadline.bound_s > limit_s and self._queue.num_running:
            self.stats.refused_late += 1
            retry_after_s = min(max(deadline.bound_s - limit_s, 1.0), MAX_RETRY_AFTER_S)
            raise FirstTokenLate(limit_s, deadline.bound_s, LIMIT_HEADER if by_header else None, retry_after_s)

    def _overloaded(self) -> Overloaded:
        self.stats.refused += 1
        message = f"{self.num_waiting} sequences are waiting, and the limit is {self._limits.max_waiting} sequences"
        message += f" and {self._limits.max_waiting_tokens} prompt tokens"
        return Overloaded(message, self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Return the seconds until the present queue will have been served, if requests take as long as recent requests
        did."""
        return min(max(self._mean_duration_s() * self.num_waiting / self._queue.window, 1.0), MAX_RETRY_AFTER_S)

    def _mean_duration_s(self) -> float:
        return sum(self._durations_s) / len(self._durations_s)


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
