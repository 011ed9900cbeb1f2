"""Runs many steps of plain decoding at once, with the same outcome as single steps."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.lab.simulator.trace import OUTPUT_ID
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.parts.kv_groups.state_cache_manager import StateSnapshots


def token_of(request: Request) -> int:
    """Return the token that is sampled for a request: always the same one, and different from other requests' tokens,
    so that no two outputs share a block."""
    return OUTPUT_ID + request.seed % (OUTPUT_ID - 1)


class FastForward:
    """Runs many steps of a scheduler in one pass over its requests, instead of two passes (schedule, commit) per step.
    It applies while every step is alike: all running requests decode, no other request can start, and blocks suffice.

    Tokens, blocks, prefix cache, finished requests and their times are the same as after single steps. Three things
    differ: the choice among equal free blocks; the engine's histograms, which miss most times between tokens; and, in a
    model with windows or states, the order in which cached blocks of these steps are evicted later.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._queue, self._pools = scheduler, scheduler.queue, scheduler.kv_cache.pools
        self._block_size = scheduler.kv_cache.pool.block_size
        self._snapshots = scheduler.parts.get(StateSnapshots)

    def max_steps(self, limit: int, now: float) -> int:
        """Return how many steps may be run at once, up to `limit`; 0 if the next step is of another kind.

        The last step may end requests. Call this when a step has just ended and no waiting request can start.
        """
        running, steps = self._queue.running, limit
        if not running:
            return 0
        for request in running:
            if request.clock.last_token_at != now or len(request.tokens) - request.computed != 1:
                return 0  # part of its prompt is left, or was left when the last step began
            left = request.num_prompt + request.max_tokens - len(request.tokens)
            if left < steps:
                steps = left
        # a request takes at most this many blocks; count exactly only if that might be too many
        available = min(pool.num_available for pool in self._pools)
        if len(running) * (steps // self._block_size + 1) <= available:
            return steps
        while steps and self._blocks_missing(steps) > available:
            steps //= 2
        return steps

    def advance(self, ends: Sequence[float]) -> None:
        """Run a step for each of `ends`, the times at which steps end. The scheduler's `out` gets the events of
        requests that have finished, or can now leave for another replica."""
        steps, stopping = len(ends), []
        for request in self._queue.running:
            tokens = request.tokens
            request.computed = computed = request.computed + steps
            if computed > request.capacity:
                grown = self._scheduler.kv_cache.grow(request, computed)
                assert grown, "a fast-forward must end before blocks run out"
            tokens += tokens[-1:] * (steps - 1)
            if self._snapshots is not None:
                self._snapshots.states.take_states([request])
            self._scheduler.kv_cache.cache_blocks(request, computed)
            if request.leaving or len(tokens) - request.num_prompt + 1 == request.max_tokens:
                stopping.append(request)  # it may stop after its last token, which is added below
            else:
                tokens.append(tokens[-1])
                request.clock.last_token_at = ends[-1]
        self._scheduler.totals.steps += steps
        self._scheduler.totals.generation_tokens += steps * len(self._queue.running) - len(stopping)
        for request in stopping:
            self._end(request, ends)

    def _blocks_missing(self, steps: int) -> int:
        size = self._block_size
        return sum(max(0, -(-(r.computed + steps - r.capacity) // size)) for r in self._queue.running)

    def _end(self, request: Request, ends: Sequence[float]) -> None:
        if len(ends) > 1:
            request.clock.last_token_at = ends[-2]
        request.in_flight = 1
        self._scheduler.append_tokens(request, [token_of(request)], None, ends[-1])
        self._scheduler.metrics.observe_tokens([request], ends[-1])
