"""Which requests an engine has, where each of them is, and what is counted of them. Pure Python."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.handoffs import HandoffManager
from engine.core.request import Request, State
from engine.core.stats import RequestMetrics
from engine.errors import ServingError
from engine.wire.messages import EngineLoad, EngineStats, FinishReason

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class RequestQueue:
    """A live request is in exactly one place, which its state names: `compiling`, `waiting`, `running`, or what
    `handoffs` has as receiving or leased. Whoever runs has a slot.

    The scheduler decides who goes where; this only moves them, and says how things are.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, handoffs: HandoffManager):
        self.config, self.pool, self.handoffs = config, pool, handoffs
        self.compiling: set[Request] = set()
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self.totals = SchedulerStats()
        self.metrics = RequestMetrics()
        self._live: dict[str, Request] = {}
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))

    # -- moves ---------------------------------------------------------------------------------------------

    def _enlist(self, request: Request) -> None:
        """It is live from now on; where it is comes next."""
        assert request.request_id not in self._live
        self._live[request.request_id] = request
        logger.debug("request queued request_id=%s prompt_tokens=%d", request.request_id, request.num_prompt)
        given = f" and {request.num_output} output tokens" if request.num_output else ""
        request.note(f"queued behind {self.num_waiting} others, with {request.num_prompt} prompt tokens{given}")

    def _compile(self, request: Request) -> None:
        request.state = State.WAITING_FOR_GRAMMAR
        self.compiling.add(request)

    def _wait(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=lambda r: r.order)

    def _run(self, request: Request) -> None:
        request.state = State.RUNNING
        request.slot = self._slots.pop()
        insort(self.running, request, key=lambda r: r.order)

    def _leave(self, request: Request) -> None:
        """Out of the place that it is in, if that is here; it keeps its blocks."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.WAITING_FOR_GRAMMAR:
            self.compiling.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self._slots.append(request.slot)
            request.slot = -1

    def _dismiss(self, request: Request, reason: FinishReason, error: ServingError | None, now: float) -> None:
        """It has left the place that it was in, and is not live any more."""
        request.state = State.FINISHED
        del self._live[request.request_id]
        self.totals.finished[reason] += 1
        self.metrics.ended(request, reason, now)
        if request.prefill_request is None:
            why = f" ({error})" if error else ""
            request.note(f"ended: {reason}{why}, {request.num_output} output tokens")
        logger.debug(
            "request ended request_id=%s reason=%s output_tokens=%d", request.request_id, reason, request.num_output
        )

    # -- books ---------------------------------------------------------------------------------------------

    def _count_scheduled(self, request: Request, cached: int, now: float) -> None:
        logger.debug("request scheduled request_id=%s cached_tokens=%d", request.request_id, cached)
        if request.scheduled_at is None:
            request.scheduled_at = now
            self.totals.prefix_queried_tokens += request.num_prompt
            self.totals.prefix_hit_tokens += cached
            self.totals.prompt_tokens += request.num_prompt
        if not request.num_preemptions:
            request.num_cached = cached
            return
        again = len(request.tokens) - cached
        self.totals.recomputed_tokens += again
        logger.info("resumed request_id=%s cached_tokens=%d recomputed_tokens=%d",
                    request.request_id, cached, again)  # fmt: skip

    # -- how things are ------------------------------------------------------------------------------------

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def live_ids(self) -> Iterable[str]:
        """Of all requests and prefill requests that have not ended."""
        return self._live.keys()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.compiling)

    @property
    def received(self) -> list[Request]:
        """Those that wait with their KV, which has come from another engine: all they need is a slot."""
        return [r for r in self.waiting if r.blocks]

    def load(self) -> EngineLoad:
        return EngineLoad(
            sequences=len(self.running) + self.num_waiting + len(self.handoffs.receiving),
            queued_tokens=sum(r.queued_tokens for r in [*self.waiting, *self.running]),
            blocks_used=self.pool.num_used,
            slots=self.config.max_num_seqs,
            blocks_total=self.pool.num_blocks,
        )

    def stats(self) -> EngineStats:
        totals, pool = self.totals, self.pool
        reserved = [*self.handoffs.receiving.values(), *self.received]
        return EngineStats(
            running=len(self.running),
            waiting=self.num_waiting,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_used=pool.num_used,
            block_size=pool.block_size,
            steps=totals.steps,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            preemptions=totals.preemptions,
            prefix_queried_tokens=totals.prefix_queried_tokens,
            prefix_hit_tokens=totals.prefix_hit_tokens,
            finished=dict(totals.finished),
            histograms=self.metrics.histograms,
            blocks_reserved=pool.num_unshared(*[r.blocks for r in reserved]),
            blocks_leased=pool.num_unshared(*[r.blocks for r in self.handoffs.leased.values()]),
            receiving=len(self.handoffs.receiving),
            leased=len(self.handoffs.leased),
            queued_tokens=sum(r.queued_tokens for r in [*self.waiting, *self.running]),
            prefill_decisions=self.handoffs.decisions(),
        )

    def check(self) -> None:
        """Raise AssertionError if requests, slots and blocks do not add up."""
        self.pool.check()
        handoffs = self.handoffs
        holders = [*self.running, *self.received, *handoffs.receiving.values(), *handoffs.leased.values()]
        held = Counter(block for request in holders for block in request.blocks)
        assert held == Counter({b: n for b, n in enumerate(self.pool.ref_counts()) if n}), "blocks held by nobody"
        receiving = [r for r in handoffs.receiving.values() if r.state is not State.FINISHED]
        live = {
            State.RUNNING: self.running,
            State.WAITING: self.waiting,
            State.WAITING_FOR_GRAMMAR: list(self.compiling),
            State.WAITING_FOR_REMOTE_KV: receiving,
            State.LEASED: list(handoffs.leased.values()),
        }
        assert len(self._live) == sum(map(len, live.values())), "a request is lost"
        for state, requests in live.items():
            assert all(request.state is state for request in requests), f"a request that is {state.value} is not"
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._slots) == list(range(self.config.max_num_seqs)), "a slot is lost"
        assert all(r.pending == 1 for r in self.received), "a waiting request holds blocks without KV"
        for queue in (self.running, self.waiting):
            assert [r.order for r in queue] == sorted(r.order for r in queue), "a queue is out of order"
