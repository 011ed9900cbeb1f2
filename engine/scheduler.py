"""Decides what each step computes. Pure Python: no torch, no clock, no socket."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidParameter, Overloaded, PromptTooLong, ServingError
from engine.messages import (
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from engine.plan import BlockChange, NewSequence, StepPlan, StepResult
from engine.request import Request, State

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell whoever asked for `request`."""

    request: Request
    delta: TokenDelta


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Scheduler:
    """Continuous batching without phases: every request has tokens that it wants computed and tokens that are
    computed, and a step narrows the gap, under one token budget for all.

    `schedule` decides, `commit` records. A second step may be planned before the first is committed; the tokens
    that the first will bring are then counted as `in_flight`.

    Requests are served in `order` (priority, then arrival). Running requests come first; each leaves one token
    of the budget to every one behind it, so a long prompt never stops the others' decoding. When blocks run
    out, only a request that comes later in the order is preempted: the first in order always gets on, so
    everyone finishes.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ):
        assert max_model_len <= pool.num_blocks * pool.block_size, "one request alone must fit the pool"
        self.config = config
        self.pool = pool
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self.totals = Totals()
        self._live: dict[str, Request] = {}
        self._arrivals = 0
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._planned: deque[tuple[StepPlan, list[Request]]] = deque()
        self._draft = Draft()

    # -- requests come and go ------------------------------------------------------------------------------

    def add(self, message: GenerateRequest, now: float) -> Request:
        """Take a request, or raise a ServingError and leave everything as it was."""
        self.check_request(message)
        if len(self.waiting) >= self.config.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting, the limit is {self.config.max_waiting}")
        self._arrivals += 1
        priority = message.priority if self.config.scheduling_policy == "priority" else 0
        request = Request.create(message, (priority, self._arrivals), self.max_model_len, now)
        self._live[request.request_id] = request
        insort(self.waiting, request, key=lambda r: r.order)
        return request

    def check_request(self, message: GenerateRequest) -> None:
        """Raise RequestError if this request could never be served."""
        if message.request_id in self._live:
            raise InvalidParameter("request_id", message.request_id, "unique among live requests")
        if not message.prompt:
            raise InvalidParameter("prompt", message.prompt, "at least one token")
        if len(message.prompt) >= self.max_model_len:
            raise PromptTooLong(len(message.prompt), self.max_model_len)
        for token in (min(message.prompt), max(message.prompt)):
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter("prompt", token, f"token ids from 0 to {self.vocab_size - 1}")
        message.params.check_vocabulary(self.vocab_size)

    def abort(
        self, request_id: str, now: float, error: ServingError | None = None, *, reason: FinishReason = "abort"
    ) -> Event | None:
        """End a request now and free what it holds. None if it is not live (it may just have finished)."""
        request = self._live.get(request_id)
        if request is None:
            return None
        return self._finish(request, "error" if error else reason, now, error=error)

    # -- plan ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing that could be computed now."""
        budget = self._plan_running()
        self._admit(budget, now)
        if not self._draft.requests:
            return None
        self.totals.steps += 1
        plan, requests = self._draft.plan(self.totals.steps), self._draft.requests
        self._planned.append((plan, requests))
        self._draft = Draft()
        return plan

    def _plan_running(self) -> int:
        """Plan all running requests, in order. Returns the budget left for new ones: none if blocks ran out."""
        budget = self.config.max_num_batched_tokens
        before = self.totals.preemptions
        queue = list(self.running)
        for behind, request in zip(range(len(queue) - 1, -1, -1), queue, strict=True):
            if request.state is not State.RUNNING:
                continue  # preempted by one before it
            count = min(request.pending, budget - behind)
            if count > 0 and self._grow(request, request.computed + count):
                self._plan(request, count)
                budget -= count
        return budget if self.totals.preemptions == before else 0

    def _admit(self, budget: int, now: float) -> None:
        """Start waiting requests, strictly in order, while budget, slots and blocks last."""
        while self.waiting and budget > 0 and self._slots:
            request = self.waiting[0]
            if request.in_flight:
                return  # it was preempted, and its last token has not arrived yet
            # room for all tokens that are known, and a spare block for every running request: to start a
            # request only to preempt another would be work done twice
            matched = self._match(request)
            fresh = self.pool.blocks_for(len(request.tokens)) - len(matched)
            blocks = self.pool.reserve(matched, fresh, spare=len(self.running))
            if blocks is None:
                return
            self.waiting.pop(0)
            self._start(request, blocks, len(matched), now)
            count = min(request.pending, budget)
            self._plan(request, count)
            budget -= count

    def _match(self, request: Request) -> list[int]:
        """Cached blocks that hold a prefix of the request; its last token is always computed, for its logits."""
        if not self.config.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        full = (len(request.tokens) - 1) // self.pool.block_size
        return self.pool.match(request.hashes(full, self.pool.block_size))

    def _start(self, request: Request, blocks: list[int], matched: int, now: float) -> None:
        request.state = State.RUNNING
        request.slot = self._slots.pop()
        request.blocks = blocks
        request.published = matched
        request.computed = matched * self.pool.block_size
        insort(self.running, request, key=lambda r: r.order)
        if request.scheduled_at is None:
            request.scheduled_at = now
            request.num_cached = request.computed
            self.totals.prefix_queried_tokens += request.num_prompt
            self.totals.prefix_hit_tokens += request.computed
            self.totals.prompt_tokens += request.num_prompt
        else:
            again = len(request.tokens) - request.computed
            self.totals.recomputed_tokens += again
            logger.info("resumed request_id=%s cached_tokens=%d recomputed_tokens=%d",
                        request.request_id, request.computed, again)  # fmt: skip
        added = NewSequence(request.slot, list(request.tokens), request.num_prompt, request.params, request.seed)
        self._draft.added.append(added)
        self._draft.blocks.append(BlockChange(request.slot, 0, list(blocks)))

    def _plan(self, request: Request, count: int) -> None:
        samples = request.computed + count == len(request.tokens) + request.in_flight
        self._draft.add(request, count, samples)
        request.computed += count
        request.in_flight += samples

    # -- blocks --------------------------------------------------------------------------------------------

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give the request blocks for `tokens` tokens, preempting others if needed; False if it went itself."""
        need = self.pool.blocks_for(tokens) - len(request.blocks)
        if need <= 0:
            return True
        while (taken := self.pool.take(need)) is None:
            victim = self._victim(request)
            self._preempt(victim)
            if victim is request:
                return False
        self._draft.blocks.append(BlockChange(request.slot, len(request.blocks), taken))
        request.blocks += taken
        return True

    def _victim(self, request: Request) -> Request:
        """Of the running requests behind `request`, the cheapest to compute again, then the newest."""
        behind = [r for r in self.running if r.order > request.order and self.pool.private(r.blocks)]
        return max(behind, key=lambda r: (-self.pool.private(r.blocks), r.order), default=request)

    def _preempt(self, request: Request) -> None:
        logger.info(
            "preempted request_id=%s computed_tokens=%d private_blocks=%d times=%d",
            request.request_id,
            request.computed,
            self.pool.private(request.blocks),
            request.num_preemptions + 1,
        )
        self._stop_running(request)
        request.state = State.WAITING
        request.computed = request.published = 0
        request.num_preemptions += 1
        self.totals.preemptions += 1
        insort(self.waiting, request, key=lambda r: r.order)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        self._slots.append(request.slot)
        request.slot = -1

    def _publish(self, request: Request, computed: int) -> None:
        """Put the blocks that a finished step has filled into the prefix cache."""
        if not self.config.enable_prefix_caching:
            return
        full = computed // self.pool.block_size
        if full <= request.published:
            return
        names = request.hashes(full, self.pool.block_size)
        for index in range(request.published, full):
            own = request.blocks[index]
            block = self.pool.publish(own, names[index])
            if block != own:  # another request computed the same prefix: share its copy
                request.blocks[index] = block
                self._draft.blocks.append(BlockChange(request.slot, index, [block]))
        request.published = full

    # -- results -------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Record the result of the oldest planned step; returns what is new, one event per request."""
        plan, requests = self._planned.popleft()
        assert plan.step == result.step, f"step {result.step} came back, step {plan.step} was expected"
        events = []
        for i, request in enumerate(requests):
            if request.state is State.FINISHED:
                continue  # ended after this step was planned
            if request.state is State.RUNNING:
                self._publish(request, plan.starts[i] + plan.counts[i])
            self._collect_prompt_logprobs(request, plan.starts[i], result.prompt_logprobs[i])
            token = result.tokens[i]
            if token is not None:
                events.append(self._append(request, token, result.logprobs[i], now))
        return events

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> Event:
        request.in_flight -= 1
        if token < 0:
            reason = "no token can be sampled: all are banned, or the model's logits are not finite"
            return self._finish(request, "error", now, error=EngineError(request.request_id, reason))
        first = request.first_token_at is None
        if first:
            request.first_token_at = now
        request.tokens.append(token)
        self.totals.generation_tokens += 1
        delta = TokenDelta(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=None if logprob is None else [logprob],
            num_cached_tokens=request.num_cached if first else 0,
            prompt_logprobs=request.prompt_logprobs if first else None,
        )
        params = request.params
        if token in self.eos_token_ids and not params.ignore_eos:
            return self._finish(request, "stop", now, delta)
        if token in params.stop_token_ids:
            return self._finish(request, "stop", now, delta, stop_reason=token)
        if request.num_output >= request.max_tokens:
            return self._finish(request, "length", now, delta)
        return Event(request, delta)

    def _collect_prompt_logprobs(self, request: Request, start: int, rows: list[TokenLogprob] | None) -> None:
        have = request.prompt_logprobs
        if rows and have is not None and len(have) >= start + 1:  # less only if computed again after preemption
            have.extend(rows[len(have) - start - 1 :])

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        delta: TokenDelta | None = None,
        *,
        stop_reason: int | None = None,
        error: ServingError | None = None,
    ) -> Event:
        if request.state is State.RUNNING:
            self._stop_running(request)
        else:
            self.waiting.remove(request)
        request.state = State.FINISHED
        del self._live[request.request_id]
        self.totals.finished[reason] += 1
        last = TokenDelta(
            request_id=request.request_id,
            token_ids=delta.token_ids if delta else [],
            logprobs=delta.logprobs if delta else None,
            prompt_logprobs=delta.prompt_logprobs if delta else None,
            num_cached_tokens=delta.num_cached_tokens if delta else 0,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=ErrorInfo.of(error) if error else None,
            times=request.times(now),
            num_preemptions=request.num_preemptions,
        )
        return Event(request, last)

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._planned)

    def stats(self) -> EngineStats:
        totals, pool = self.totals, self.pool
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
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
        )

    def check(self) -> None:
        """Raise AssertionError if requests, slots and blocks do not add up."""
        self.pool.check()
        held = Counter(block for request in self.running for block in request.blocks)
        assert held == Counter({b: n for b, n in enumerate(self.pool.refs()) if n}), "blocks held by nobody"
        assert len(self._live) == len(self.running) + len(self.waiting), "a request is lost"
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._slots) == list(range(self.config.max_num_seqs)), "a slot is lost"
        assert all(not request.blocks for request in self.waiting), "a waiting request holds blocks"
        for queue in (self.running, self.waiting):
            assert [r.order for r in queue] == sorted(r.order for r in queue), "a queue is out of order"


class Draft:
    """A step in the making. Block changes may gather here before any request is planned."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.added: list[NewSequence] = []
        self.blocks: list[BlockChange] = []
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._samples: list[bool] = []

    def add(self, request: Request, count: int, samples: bool) -> None:
        self.requests.append(request)
        self._slots.append(request.slot)
        self._starts.append(request.computed)
        self._counts.append(count)
        self._samples.append(samples)

    def plan(self, step: int) -> StepPlan:
        return StepPlan(step, self.added, self.blocks, self._slots, self._starts, self._counts, self._samples)
