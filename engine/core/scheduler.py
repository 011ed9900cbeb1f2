"""The scheduler: decides what each step computes. Pure Python: no torch, no clock, no socket."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.core.block_allocator import BlockAllocator
from engine.core.door import inputs
from engine.core.door.journal import NOBODY_LISTENS, Journal
from engine.core.door.kernel import ModelLimits
from engine.core.door.offers import ComputeSeconds, Offers, unknown
from engine.core.door.outputs import Outputs, Receiver
from engine.core.door.part import Part, Parts
from engine.core.door.request_checks import RequestChecks
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import Event, StopConditions, last_delta, tokens_delta
from engine.core.prompt_budget import PromptBudget
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.core.stats import RequestMetrics, SchedulerStats
from engine.core.step_plan_builder import StepPlanBuilder
from engine.engine_options import EngineOptions
from engine.errors import EngineError, InvalidParameter, Overloaded, RequestError, RequestTimeout, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.plan import ALL_TOKENS_BANNED, StepPlan, StepResult
from engine.wire.token_delta import FinishReason, TokenDelta, TokenLogprob

logger = logging.getLogger(__name__)

LOOKED_AT = 256  # waiting requests among which a step chooses; more would take longer than their order is worth
ALL_BANNED = "no token can be sampled: all tokens are banned"
LOGITS_NOT_FINITE = "no token can be sampled: the model's logits are not finite"
NOT_FINITE = "the model's hidden states are not finite"


class Scheduler:
    """Continuous batching without phases: every request has known tokens and computed tokens, and each step narrows the
    gap between them, under one token budget for all requests.

    `apply` takes what comes from outside (door/inputs.py), `schedule` decides, `commit` records, and `out` has what
    leaves (door/outputs.py). A second step may be planned before the first is committed; the tokens that the first will
    sample are then counted as `in_flight`.

    Requests decode in `order` (priority, then arrival). Each leaves one token of the budget for every other running
    request, and prompts get what is left, running and waiting ones by the rule of PromptBudget. When blocks run out,
    only requests later in the order are preempted: the first in order always makes progress, so every request finishes.

    Optional features are `parts` (part.py), which the scheduler calls where they affect its decisions.
    """

    def __init__(
        self,
        config: EngineOptions,
        kv_cache: KVCacheManager,
        *,
        limits: ModelLimits,
        parts: Sequence[Part] = (),
        compute_s: ComputeSeconds = unknown,
    ):
        """parts: in the order in which they are asked. compute_s: as for Offers. The KV cache must have room for one
        request of `max_model_len`."""
        self.config, self.kv_cache, self.limits = config, kv_cache, limits
        self.block_size = kv_cache.pool.block_size
        self.parts = Parts(parts)
        self.queue = RequestQueue(config.max_num_seqs, self.parts.stopped)
        self.offers = Offers(self.parts.offer, compute_s, self.block_size)
        self.prompts = PromptBudget(config, kv_cache, limits)
        self._checks = RequestChecks(limits, self.parts)
        self.totals = SchedulerStats()
        self.metrics = RequestMetrics()
        self._blocks = BlockAllocator(self.kv_cache, self.queue, self.parts, self.totals)
        self._stops = StopConditions(limits.eos_token_ids)
        #: Planned steps that are not committed yet, oldest first, each with the requests of its entries.
        self.planned: deque[tuple[StepPlan, list[Request]]] = deque()
        self._builder = StepPlanBuilder()
        self._num_arrived = 0
        self.next_deadline = math.inf  # the earliest of all live requests, or of one that has ended
        self.journal: Journal = NOBODY_LISTENS
        self.out = Outputs()
        for part in parts:
            part.attach(self)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their turn, or for cached KV from elsewhere."""
        return len(self.queue.waiting) + len(self.parts.kept(State.LOADING_KV))

    @property
    def has_work(self) -> bool:
        return bool(self.queue.live or self.planned or self.parts.kept())

    def take_messages(self, to: Receiver) -> list[Any]:
        """Return what may go to a receiver now, oldest first."""
        return self.out.take_messages(to, self.totals.steps - len(self.planned))

    # -- inputs --------------------------------------------------------------------------------------------

    def apply(self, given: inputs.Input, now: float) -> Any:
        """Take an input. Returns and raises what the input says; `out` has what else comes of it."""
        self.journal.entering(given)
        answer: Any = None
        match given:
            case inputs.PartInput():
                answer = given.apply(self, now)
            case inputs.Added(message):
                answer = self._add(message, now)
            case inputs.Aborted(request_id, reason, error):
                self.abort(request_id, now, error, reason=reason)
            case inputs.CacheCleared():
                self._clear_cache()
            case _:
                raise AssertionError(f"nobody takes {given}")
        self.journal.given(given, now)
        return answer

    def _add(self, message: GenerateRequest, now: float) -> Request:
        """Queue a request, or raise a ServingError and change nothing."""
        self.check_request(message)
        request = Request.create(message, self.limits.max_model_len, now, self.parts.generates(message))
        priority = message.priority if self.config.scheduling_policy == "priority" else 0
        return self.enqueue(request, message, priority)

    def check_request(self, message: GenerateRequest) -> None:
        """Raise RequestError if this request could never be served."""
        if message.request_id in self.queue.live:
            raise InvalidParameter("request_id", message.request_id, "unique among live requests")
        self._checks.check(message)

    def check_prompt(self, request: Request, asked: Any) -> None:
        """Raise RequestError if a request that generates could never be computed here. asked: what it was made from."""
        self._checks.check_prompt(request, asked)

    def enqueue(self, request: Request, asked: Any, priority: int = 0) -> Request:
        """Queue a request that has been checked. Returns it, or raises Overloaded and changes nothing. asked: what it
        was made from."""
        if (waiting := self.num_waiting) >= self.config.max_waiting:
            raise Overloaded(f"{waiting} requests are waiting, the limit is {self.config.max_waiting}")
        request.order = priority, self._num_arrived
        self._num_arrived += 1
        given = f" and {request.num_output} output tokens" if request.num_output else ""
        request.note(f"queued behind {waiting} others, with {request.num_prompt} prompt tokens{given}")
        for opened in self.parts.opened:
            opened(request, asked)
        self.queue.add(request)
        self.next_deadline = min(self.next_deadline, request.clock.deadline_at)
        logger.debug("request queued request_id=%s prompt_tokens=%d", request.request_id, request.num_prompt)
        return request

    def _clear_cache(self) -> None:
        for cleared in self.parts.cleared:
            cleared()
        self.kv_cache.clear_cache()

    def abort(
        self, request_id: str, now: float, error: ServingError | None = None, *, reason: FinishReason = "abort"
    ) -> None:
        """End a request: see inputs.Aborted."""
        request = self.queue.live.get(request_id)
        if request is None:
            return
        if not any(cancelled(request, str(error or "cancelled")) for cancelled in self.parts.cancelled):
            self.finish(request, "error" if error else reason, now, error=error)

    def _abort_overdue(self, now: float) -> None:
        live = [request for request in self.queue.live.values() if request.state is not State.LEASED]
        deadlines = [(request.clock.deadline_at, request) for request in live]
        self.next_deadline = min((deadline for deadline, _ in deadlines if deadline > now), default=math.inf)
        for deadline, request in deadlines:
            if deadline <= now:
                error = RequestTimeout(request.request_id, deadline - request.clock.arrived_at)
                self.abort(request.request_id, now, error)

    # -- plan ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """End the requests whose time is over, and plan the next step. Returns None if nothing can be computed now."""
        try:
            plan = self._schedule(now)
        except BaseException:
            self.journal.failed(now)
            raise
        self.journal.planned(plan, now)
        return plan

    def _schedule(self, now: float) -> StepPlan | None:
        if now >= self.next_deadline:
            self._abort_overdue(now)
        for update in self.parts.update:
            update(now)
        if not all(may_plan(self.planned, len(self.queue.running)) for may_plan in self.parts.may_plan):
            return None
        before = self.totals.preemptions
        budget, prompts = self._plan_decodes()
        # a step that preempts starts no request, unless it preempted all running ones: then the next in order starts
        self._plan_prompts(prompts, budget, now, may_start=self.totals.preemptions == before)
        if not self._builder.requests and self.totals.preemptions > before:
            self._start_step(len(self.queue.running))  # a preempted request may have used them up
            self._plan_prompts(prompts, self.config.max_num_batched_tokens, now, may_start=not self.queue.running)
        if not self._builder.requests:
            return None
        self.totals.steps += 1
        builder, self._builder = self._builder, StepPlanBuilder()
        self.out.planned = step = self.totals.steps
        for planned in self.parts.planned:
            planned(builder, step)
        plan = builder.plan(step, self.kv_cache.take_changes())
        self.metrics.observe_step(plan.num_tokens)
        self.planned.append((plan, builder.requests))
        return plan

    def _plan_decodes(self) -> tuple[int, list[Request]]:
        """Plan the running requests that lack one token, in order. Returns the tokens left for others, and the running
        requests that lack more: prompts."""
        budget, queue, prompts = self.config.max_num_batched_tokens, list(self.queue.running), list[Request]()
        drafters, unplanned = self.parts.drafts, len(queue)
        self._start_step(unplanned)
        kept = self.prompts.least if drafters and any(request.pending > 1 for request in queue) else 0  # from drafts
        for request in queue:
            if request.state is not State.RUNNING or request.is_undecided:
                unplanned -= 1
                continue  # the first of these were preempted by one before them
            count = request.pending
            if count > 1:
                if request is queue[0] and request.computed >= request.capacity and self._limit(request, 1):
                    self._blocks.grow(request, request.computed + 1)  # as long as all others can be preempted for it
                prompts.append(request)
                continue
            unplanned -= 1
            count, start = self._limit(request, count), request.computed
            tokens = start + count
            if count > 0 and (tokens <= request.capacity or self._blocks.grow(request, tokens)):
                drafts: list[int] = []
                room = max(budget - unplanned - kept, count) - count
                for draft in drafters:
                    drafts += draft(request, count, room - len(drafts))
                self._builder.compute(request, count, drafts)
                budget -= request.computed - start
        return budget, prompts

    def _plan_prompts(self, running: list[Request], budget: int, now: float, *, may_start: bool) -> None:
        """Plan prompts, those that run and those that wait, by the rule of PromptBudget, while tokens, slots and blocks
        last. may_start: whether waiting ones may start."""
        prompts = [request for request in running if request.state is State.RUNNING]
        waiting = self._startable() if may_start else []
        if not prompts and not waiting:
            return
        left, oldest = self.prompts.tokens(budget), min(prompts[:1] + waiting[:1], key=lambda r: r.order)
        for request in waiting:
            overdue = self.prompts.is_overdue(request)
            if (overdue or request is oldest) and not self._admit(request, left, prompts, now) and overdue:
                waiting = [other for other in waiting if other.order < request.order]
                break
        oldest = min(prompts, key=lambda r: r.order, default=oldest)
        kept, blocked = self.prompts.kept_for(oldest, left) if prompts else 0, math.inf
        for request in self.prompts.ranked({*prompts, *waiting}, now):
            if request is oldest:
                kept = 0
            ran, expected = request in running, self.prompts.left_of(request)
            may_start = not ran and request.state is State.WAITING and expected < blocked
            if may_start and not self._admit(request, left - kept, prompts, now):
                blocked = expected  # nor are there blocks for longer ones
            if request.state is State.RUNNING:
                left -= self._compute(request, left - kept, may_grow=ran)

    def _startable(self) -> list[Request]:
        """Return the first waiting requests that lack nothing but tokens, blocks or a slot, in order. If none of them
        can get these, there is at most one."""
        found, receive = list[Request](), self.parts.may_receive
        for request in self.queue.waiting:
            if request.in_flight:
                break  # it was preempted, and its last token has not arrived yet
            if request.is_undecided or not all(may_start(request) for may_start in self.parts.may_start):
                continue  # its next mask is still being computed, which may take long, or what it needs is on its way
            found.append(request)
            if len(found) == LOOKED_AT or not (self.queue.has_free_slot or receive):
                break
        return found

    def _admit(self, request: Request, room: int, prompts: list[Request], now: float) -> bool:
        """Start a waiting request, if it can get blocks and a slot, and the step has room for some of its tokens.
        prompts: those that are being computed, to which it is added. Returns False if it has to wait for blocks or for
        a slot."""
        fits = self.prompts.left_of(request) <= room
        if not fits and not self.prompts.may_be_partial(request, prompts):
            return True
        startable = room >= self.prompts.needed(request) and self.queue.has_free_slot
        if not request.tables and not self._reserve(request, startable, now):
            return False
        if startable and request.tables and request.state is State.WAITING:
            self._start(request)
            prompts.append(request)
        return True

    def _compute(self, request: Request, room: int, *, may_grow: bool) -> int:
        """Plan the next tokens of a prompt, as far as the step has room for them. Returns how many. may_grow: whether
        others may be preempted for its blocks."""
        count = self.prompts.chunk(request, room, alone=len(self.queue.live) == 1)
        if not may_grow:
            count = min(count, request.capacity - request.computed)
        count = self._limit(request, count)
        tokens = request.computed + count
        if tokens > request.capacity and not self._blocks.grow(request, tokens, self._builder.requests):
            count = min(count, request.capacity - request.computed)  # 0 if it was preempted itself
        if count > 0:
            self._builder.compute(request, count)
        return max(0, count)

    def _limit(self, request: Request, count: int) -> int:
        for up_to in self.parts.up_to:
            count = up_to(request, count)
        return count

    def _start_step(self, sequences: int) -> None:
        for start_step in self.parts.start_step:
            start_step(sequences)

    def _shorten(self, request: Request, matched: int, block_size: int) -> int:
        for shorten in self.parts.shorten:
            matched = shorten(request, matched, block_size)
        return matched

    def _reserve(self, request: Request, startable: bool, now: float) -> bool:
        """Decide where a prompt is computed, and give the request its blocks. The request then waits for a slot, or for
        KV from another engine. Returns False if it has to wait for blocks or for a slot."""
        if not startable and not any(may_receive(request) for may_receive in self.parts.may_receive):
            return False
        matched = self.kv_cache.match(request, self._shorten)
        cached = matched * self.block_size
        request.expected = len(request.tokens) - cached
        if self.kv_cache.in_flight(request, matched, self.queue.running):
            return True  # it waits for the prefix that a running request computes
        offer = self.offers.take(request, matched, self._shorten, self._blocks.watermark, now)
        if offer is not None and not offer.keeps_blocks:
            self.queue.remove(request)
            request.state = State.LOADING_KV
            return True
        # the first token arrives with remote KV: reserve for it too, so that the request lacks nothing in its slot
        known = len(request.tokens)
        tokens, start = (known, cached) if offer is None else (known + 1, known)
        if not (startable or offer) or not self._blocks.reserve(request, matched, start, tokens):
            return False
        self.totals.observe_scheduled(request, cached, now)
        self.queue.overtake(request, known - cached)
        for reserved in self.parts.reserved:
            reserved(request, matched, now)
        where = "to be computed here" if offer is None else offer.source
        request.note(f"{where}; {cached} of {known} tokens are cached")
        if offer is None:
            request.computed = cached
            return True
        self.queue.remove(request)
        request.state = State.WAITING_FOR_REMOTE_KV
        return offer.start(now)

    def _start(self, request: Request) -> None:
        """Move a request that holds its blocks into a slot."""
        self.queue.run(request)
        for started in self.parts.started:
            started(request)
        self._builder.add_sequence(request)
        self.kv_cache.add_sequence(request)

    # -- results -------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float, step_s: float = 0.0) -> None:
        """Record the result of the oldest planned step. `out` gets an event for each request that got a token. step_s:
        seconds that the step took."""
        step, before = self.planned.popleft(), len(self.out.events)
        self.prompts.observe(step[0], step_s)
        try:
            self._commit(*step, result, now)
        finally:
            self.journal.committed(step, result, now, step_s, self.out.events[before:])

    def _commit(self, plan: StepPlan, requests: list[Request], result: StepResult, now: float) -> None:
        assert plan.step == result.step, f"step {result.step} came back, step {plan.step} was expected"
        for step_ended in self.parts.step_ended:
            step_ended(plan)
        cache_blocks, before = self.kv_cache.cache_blocks, len(self.out.events)
        verifiers = self.parts.verified
        columns = zip(requests, plan.starts, plan.counts, result.tokens, result.logprobs, strict=True)
        for i, (request, start, count, tokens, logprobs) in enumerate(columns):
            running = request.state is State.RUNNING
            if not running and request.state in (State.FINISHED, State.LEASED):
                continue  # ended after this step was planned
            computed = start + count
            for verified in verifiers if tokens else ():
                rejected = verified(request, len(tokens) - 1, result.drafts.get(i, ()))
                computed -= rejected
                request.computed -= rejected if running else 0
            if known := running and computed <= request.computed:  # else it was preempted meanwhile
                cache_blocks(request, computed)
            if request.marks and computed >= request.marks[0] and (known or tokens):  # all, before its first token
                self._passed(request, computed, now)
            if rows := result.prompt_logprobs[i]:
                request.add_prompt_logprobs(start, rows)
            if request.asked_by:
                error = self._sampling_error(request, tokens[0]) if tokens and tokens[0] < 0 else None
                for progressed in self.parts.progressed:
                    progressed(request, computed, tokens, logprobs, error)
            elif tokens:
                self.append_tokens(request, tokens, logprobs, now)
            elif i in result.answers:
                self._answer(request, result.answers[i], now)
        self.metrics.observe_tokens([e.request for e in self.out.events[before:] if e.delta.token_ids], now)

    def _passed(self, request: Request, computed: int, now: float) -> None:
        request.marks = [mark for mark in request.marks if mark > computed]
        for passed in self.parts.passed:
            passed(request, computed, now)

    def arrived(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Record that the KV of all known tokens of a queued request has come from elsewhere, and its next token."""
        self._passed(request, len(request.tokens), now)
        self.append_tokens(request, [token], None if logprob is None else [logprob], now)
        self.metrics.observe_tokens([request], now)

    def append_tokens(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None, now: float
    ) -> None:
        """Record the tokens that a step sampled for a request, and end the request at the first token that stops it.
        The caller records token times, for all requests of the step together."""
        request.in_flight -= 1
        if tokens[0] < 0:
            self.finish(request, "error", now, error=self._sampling_error(request, tokens[0]))
            return
        if first := request.clock.first_token_at is None:
            request.clock.first_token_at = now
            request.note("first token")
        known, constraint, reason = len(request.tokens), request.constraint, None
        if request.tables:  # else it was preempted meanwhile
            request.finite = known
        position = known - request.num_prompt
        for count, token in enumerate(tokens, 1):
            request.tokens.append(token)
            if constraint is not None:
                constraint.accept(token)
            if reason := self._stops.reason(request, token, position + count):
                break
        if len(tokens) > 1 and request.state is State.RUNNING:
            self.kv_cache.cache_blocks(request, request.computed)
        self.totals.generation_tokens += count
        delta = tokens_delta(request, position, logprobs, now, first=first)
        if reason:
            self.finish(request, reason, now, self._stops.named(request, delta) if reason == "stop" else delta)
        elif not (request.leaving and any(let_go(request, delta, now) for let_go in self.parts.let_go)):
            self.out.events.append(Event(request, delta))
            if constraint is not None:
                guesses = [guess(request) for guess in self.parts.guess]
                constraint.start_masks(guesses[0] if guesses else None)

    def _sampling_error(self, request: Request, token: int) -> ServingError:
        """Return why no token could be sampled for a request. token: the reason, as in StepResult."""
        if token != ALL_TOKENS_BANNED:
            self._invalidate(request)
        if request.constraint is not None and (refusal := request.constraint.refusal) is not None:
            return refusal
        banned = token == ALL_TOKENS_BANNED
        return RequestError(ALL_BANNED) if banned else EngineError(request.request_id, LOGITS_NOT_FINITE)

    def _answer(self, request: Request, answer: bytes, now: float) -> None:
        """End a request that asks a part for something else than tokens."""
        if not answer:
            self._invalidate(request)
            self.finish(request, "error", now, error=EngineError(request.request_id, NOT_FINITE))
            return
        delta = TokenDelta(request_id=request.request_id, answer=answer, num_cached_tokens=request.prefix.num_cached)
        self.finish(request, "stop", now, delta)

    def _invalidate(self, request: Request) -> None:
        """Drop the KV of a request wherever it is kept, since it may hold non-finite numbers."""
        for invalidated in self.parts.invalidated:
            invalidated(request)
        if request.tables:  # else it was preempted after the step was planned
            self.kv_cache.invalidate(request)

    def finish(
        self, request: Request, reason: FinishReason, now: float, delta: TokenDelta | None = None,
        *, error: ServingError | None = None,
    ) -> None:  # fmt: skip
        """End a request. Only this method ends requests."""
        self.queue.remove(request)
        for ending in self.parts.ending:
            ending(request, error)
        if request.state is not State.WAITING_FOR_REMOTE_KV:  # else its blocks are released once nobody writes to them
            self.kv_cache.release(request, finite=reason not in ("abort", "error"))
        request.state = State.FINISHED
        del self.queue.live[request.request_id]
        self.totals.finished[reason] += 1
        self.metrics.observe_finished(request, reason, now)
        self.journal.ended(request, reason)
        if not request.asked_by:
            why = f" ({error})" if error else ""
            request.note(f"ended: {reason}{why}, {request.num_output} output tokens")
        logger.debug(
            "request ended request_id=%s reason=%s output_tokens=%d", request.request_id, reason, request.num_output
        )
        self.out.events.append(Event(request, last_delta(request, delta, reason, now, error)))

    def check(self) -> None:
        """Raise AssertionError if requests, slots and blocks do not add up."""
        for audit in self.parts.audit:
            audit(self.queue.running)
        kept = self.parts.kept()
        self.queue.check([request for request in kept if request.state is not State.FINISHED])
        self.kv_cache.check([*self.queue.running, *self.queue.waiting_with_kv, *(r for r in kept if r.tables)])
