"""Decides what each step computes. Pure Python: no torch, no clock, no socket."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable, InvalidParameter, Overloaded, PromptTooLong, ServingError
from engine.journal import Journal
from engine.kv_transfer.events import Closed, Failed, HandoffEvent, Received
from engine.kv_transfer.ledger import HandoffLedger
from engine.kv_transfer.ticket import PrefillTicket
from engine.messages import (
    EngineLoad,
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from engine.plan import BlockChange, NewSequence, StepPlan, StepResult
from engine.request import Grammar, Request, State
from engine.request_metrics import RequestMetrics

logger = logging.getLogger(__name__)

NO_TOKEN = "no token can be sampled: all are banned, or the model's logits are not finite"


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

    The KV of a prompt may come from another engine (`handoffs`). Its request holds all blocks that the prompt needs
    meanwhile, and takes a slot only when the KV is there, as if its prompt had been cached.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        handoffs: HandoffLedger | None = None,
        journal: Journal | None = None,
    ):
        """journal: where it writes down what becomes of each request."""
        assert max_model_len <= pool.num_blocks * pool.block_size, "one request alone must fit the pool"
        self.config = config
        self.pool = pool
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.handoffs = handoffs or HandoffLedger()
        self._journal = journal or Journal()
        self.compiling: set[Request] = set()
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self.totals = Totals()
        self.metrics = RequestMetrics()
        self._live: dict[str, Request] = {}
        self._arrivals = 0
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._planned: deque[tuple[StepPlan, list[Request]]] = deque()
        self._draft = Draft()

    # -- requests come and go ------------------------------------------------------------------------------

    def add(self, message: GenerateRequest, now: float) -> Request:
        """Take a request, or raise a ServingError and leave everything as it was."""
        self.check_request(message)
        self._check_room()
        priority = message.priority if self.config.scheduling_policy == "priority" else 0
        return self._take(Request.create(message, (priority, self._arrivals + 1), self.max_model_len, now))

    def add_ticket(self, ticket: PrefillTicket, now: float) -> Request:
        """Take a prompt to be computed for another engine, or raise a ServingError and leave everything as it was."""
        self._check_tokens(ticket.token_ids, ticket.num_prompt)
        ticket.params.check_vocabulary(self.vocab_size)
        self._check_room()
        return self._take(Request.for_ticket(ticket, (0, self._arrivals + 1), now))

    def _check_room(self) -> None:
        if self.num_waiting >= self.config.max_waiting:
            raise Overloaded(f"{self.num_waiting} requests are waiting, the limit is {self.config.max_waiting}")

    def _take(self, request: Request) -> Request:
        assert request.request_id not in self._live
        self._arrivals += 1
        self._live[request.request_id] = request
        logger.debug("request queued request_id=%s prompt_tokens=%d", request.request_id, request.num_prompt)
        given = f" and {request.num_output} output tokens" if request.num_output else ""
        self._note(request, f"queued behind {self.num_waiting} others, with {request.num_prompt} prompt tokens{given}")
        if request.params.structured_outputs is None:
            self._queue(request)
        else:
            request.state = State.COMPILING
            self.compiling.add(request)
        return request

    def compiled(self, request: Request, grammar: Grammar) -> None:
        """The request's grammar is there, so that it may run."""
        self.compiling.remove(request)
        request.grammar = grammar
        self._queue(request)

    def _note(self, request: Request, line: str) -> None:
        """For the journal, where what is computed for another engine stands under the request's id there."""
        self._journal.add(request.request_id if request.ticket is None else request.ticket.request_id, line)

    def _queue(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=lambda r: r.order)

    def check_request(self, message: GenerateRequest) -> None:
        """Raise RequestError if this request could never be served."""
        if message.request_id in self._live:
            raise InvalidParameter("request_id", message.request_id, "unique among live requests")
        self._check_tokens(message.prompt, message.num_prompt)
        message.params.check_vocabulary(self.vocab_size)
        given = 0 if message.num_prompt is None else len(message.prompt) - message.num_prompt
        if message.params.max_tokens is not None and given >= message.params.max_tokens:
            raise InvalidParameter("max_tokens", message.params.max_tokens, f"above the {given} that are given already")
        only_here = message.params.prompt_logprobs is not None or not self.handoffs.decides
        if message.prefill == "remote" and only_here:
            raise InvalidParameter("prefill", message.prefill, "auto or local where no other engine computes prompts")

    def _check_tokens(self, tokens: list[int], num_prompt: int | None) -> None:
        if not tokens:
            raise InvalidParameter("prompt", tokens, "at least one token")
        if len(tokens) >= self.max_model_len:
            raise PromptTooLong(len(tokens), self.max_model_len)
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter("prompt", token, f"token ids from 0 to {self.vocab_size - 1}")
        if num_prompt is not None and not 1 <= num_prompt <= len(tokens):
            raise InvalidParameter("num_prompt", num_prompt, f"between 1 and the length of the prompt ({len(tokens)})")

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def abort(
        self, request_id: str, now: float, error: ServingError | None = None, *, reason: FinishReason = "abort"
    ) -> Event | None:
        """End a request now and free what it holds. None if it is not live (it may just have finished), or if it is
        computed for another engine, which may still read its blocks: that one is told, and the end is left to it."""
        request = self._live.get(request_id)
        if request is None:
            return None
        if request.ticket is not None:
            if request.state is not State.LEASED:
                self._retire(request)
            self.handoffs.refuse(request, "cancelled" if error is None else str(error))
            return None
        return self._finish(request, "error" if error else reason, now, error=error)

    # -- plan ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing that could be computed now."""
        before = self.totals.preemptions
        budget = self._plan_running()
        if self.totals.preemptions == before:  # none are started while blocks run out
            self._admit(budget, now)
        if not self._draft.requests:
            return None
        self.totals.steps += 1
        plan, requests = self._draft.plan(self.totals.steps), self._draft.requests
        self.metrics.step(plan.num_tokens)
        self._planned.append((plan, requests))
        self._draft = Draft()
        return plan

    def _plan_running(self) -> int:
        """Plan all running requests, in order. Returns the budget left for new ones."""
        budget = self.config.max_num_batched_tokens
        queue = list(self.running)
        for behind, request in zip(range(len(queue) - 1, -1, -1), queue, strict=True):
            if request.state is not State.RUNNING:
                continue  # preempted by one before it
            if request.held_back:
                continue
            count = min(request.pending, budget - behind)
            if count > 0 and self._grow(request, request.computed + count):
                self._plan(request, count)
                budget -= count
        return budget

    def _admit(self, budget: int, now: float) -> None:
        """Start waiting requests, strictly in order, while budget, slots and blocks last."""
        for request in list(self.waiting):
            if request.in_flight:
                return  # it was preempted, and its last token has not arrived yet
            if request.held_back:
                continue  # what may come next is still being worked out, which may take long
            startable = budget > 0 and bool(self._slots)
            if not request.blocks:
                matched = self._match(request)
                cached = len(matched) * self.pool.block_size
                place = self.handoffs.decide(request, cached, self.running)
                if not (startable or place.remote) or not self._reserve(request, matched, place.remote):
                    return
                self.handoffs.count(place)
                self._count_scheduled(request, cached, now)
                why = f": {place.reason}" if place.reason else ""
                where = "by a prefill engine" if place.remote else "here"
                self._note(request, f"to be computed {where}{why}; {cached} of {len(request.tokens)} tokens are cached")
                if place.remote:
                    self.waiting.remove(request)
                    request.state = State.RECEIVING
                    request.handoff_at = (now, now)
                    self.handoffs.open(request, cached, now, self.pool.block_size)
                    continue
                request.published, request.computed = len(matched), cached
            if not startable:
                continue  # its KV has come from elsewhere; others may be sent to be computed there meanwhile
            self.waiting.remove(request)
            self._start(request)
            count = min(request.pending, budget)
            self._plan(request, count)
            budget -= count

    def _match(self, request: Request) -> list[int]:
        """Cached blocks that hold a prefix of the request; its last token is always computed, for its logits."""
        if not self.config.enable_prefix_caching or request.prompt_logprobs is not None:
            return []
        full = (len(request.tokens) - 1) // self.pool.block_size
        return self.pool.match(request.hashes(full, self.pool.block_size))

    def _reserve(self, request: Request, matched: list[int], remote: bool) -> bool:
        """Blocks for all tokens that are known. Requests behind it that only wait for a slot give theirs back."""
        # one more where the first token comes with the KV: then nothing is missing when there is a slot
        need = self.pool.blocks_for(len(request.tokens) + remote) - len(matched)
        while True:
            idle = [r for r in self.waiting if r.blocks]
            # a spare block for everyone who will grow: to start a request only to preempt another would be work done
            # twice
            growing = sum(r.ticket is None for r in self.running) + len(idle) + len(self.handoffs.receiving)
            blocks = self.pool.reserve(matched, need, spare=growing)
            if blocks is not None:
                request.blocks = blocks
                request.published = len(matched)
                return True
            if not idle or idle[-1].order < request.order:
                return False
            self._preempt(idle[-1])

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

    def _start(self, request: Request) -> None:
        """Give the request, which holds its blocks, a slot."""
        request.state = State.RUNNING
        request.slot = self._slots.pop()
        insort(self.running, request, key=lambda r: r.order)
        added = NewSequence(request.slot, list(request.tokens), request.num_prompt, request.params, request.seed)
        self._draft.added.append(added)
        self._draft.blocks.append(BlockChange(request.slot, 0, list(request.blocks)))
        if request.ticket is not None:
            self.handoffs.report(request, request.computed, self.pool.block_size)

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
        """Of the requests behind `request`, the cheapest to compute again, then the newest; rather one that only
        waits for a slot. Not one that is computed for another engine, which reads its blocks."""
        holders = [*self.running, *(r for r in self.waiting if r.blocks)]
        behind = [r for r in holders if r.order > request.order and r.ticket is None and self.pool.private(r.blocks)]
        idle = State.WAITING
        return max(behind, key=lambda r: (r.state is idle, -self.pool.private(r.blocks), r.order), default=request)

    def _preempt(self, request: Request) -> None:
        logger.info(
            "preempted request_id=%s computed_tokens=%d private_blocks=%d times=%d",
            request.request_id,
            request.computed,
            self.pool.private(request.blocks),
            request.num_preemptions + 1,
        )
        self._note(request, f"preempted, since blocks ran out; {request.computed} computed tokens are given up")
        self._leave(request)
        self._release(request)
        self._queue(request)
        request.num_preemptions += 1
        self.totals.preemptions += 1

    def _leave(self, request: Request) -> None:
        """Out of the queue that it is in; it keeps its blocks."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.COMPILING:
            self.compiling.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self._slots.append(request.slot)
            request.slot = -1

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = request.published = 0

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
                if request.slot >= 0:
                    self._draft.blocks.append(BlockChange(request.slot, index, [block]))
        request.published = full

    # -- handoffs ------------------------------------------------------------------------------------------

    def handle(self, event: HandoffEvent, now: float) -> list[Event]:
        """A handoff has got on; returns what is new."""
        match event:
            case Closed():
                request = self._live[event.handoff_id]
                return [self._finish(request, "length" if event.reason == "released" else "abort", now)]
            case Received():
                request = self.handoffs.received(event, now)
                verified = len(request.tokens)
            case Failed():
                request = self.handoffs.failed(event.handoff_id, event.retry)
                verified = event.verified
        request.handoff_at = request.handoff_at and (request.handoff_at[0], now)
        self._publish(request, verified)
        if request.state is State.FINISHED:
            self._release(request)
            return []
        self._queue(request)
        if isinstance(event, Failed):
            self._release(request)
            if self.handoffs.gives_up(request):
                why = f"{event.reason} {event.detail}".rstrip()
                error = EngineUnavailable(f"no other engine could compute the prompt: {why}")
                return [self._finish(request, "error", now, error=error)]
            return []
        request.computed, request.in_flight = verified, 1
        request.num_cached = max(request.num_cached, event.first.cached)
        return [self._append(request, event.first.token, event.first.logprob, now)]

    def _report(self, request: Request, computed: int, token: int | None, logprob: TokenLogprob | None) -> None:
        """Tell the engine that wanted this prompt how far it is; with a token it is done, and only holds its blocks."""
        self.handoffs.report(request, computed, self.pool.block_size)
        if token is None:
            return
        request.in_flight -= 1
        if token < 0:
            self.handoffs.refuse(request, NO_TOKEN)
        else:
            self.handoffs.finish(request, token, logprob, self.pool.block_size)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Nothing more is computed for it; its blocks stay until they are read."""
        self._leave(request)
        request.state = State.LEASED
        self.handoffs.leased[request.request_id] = request

    # -- results -------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Record the result of the oldest planned step; returns what is new, one event per request."""
        plan, requests = self._planned.popleft()
        assert plan.step == result.step, f"step {result.step} came back, step {plan.step} was expected"
        events = []
        for i, request in enumerate(requests):
            if request.state in (State.FINISHED, State.LEASED):
                continue  # ended after this step was planned
            computed = plan.starts[i] + plan.counts[i]
            if request.state is State.RUNNING:
                self._publish(request, computed)
            self._collect_prompt_logprobs(request, plan.starts[i], result.prompt_logprobs[i])
            token = result.tokens[i]
            if request.ticket is not None:
                self._report(request, computed, token, result.logprobs[i])
            elif token is not None:
                events.append(self._append(request, token, result.logprobs[i], now))
        return events

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None, now: float) -> Event:
        request.in_flight -= 1
        if token < 0:
            error: ServingError = EngineError(request.request_id, NO_TOKEN)
            if request.grammar is not None and request.grammar.error is not None:
                assert request.params.structured_outputs is not None
                error = request.params.structured_outputs.invalid(f"simple enough to follow ({request.grammar.error})")
            return self._finish(request, "error", now, error=error)
        first = request.first_token_at is None
        if first:
            request.first_token_at = now
            self._note(request, "first token")
        request.tokens.append(token)
        if request.grammar is not None:
            request.grammar.accept(token)
        self.totals.generation_tokens += 1
        self.metrics.token(request, now)
        delta = TokenDelta(
            request_id=request.request_id,
            position=request.num_output - 1,
            token_ids=[token],
            logprobs=None if logprob is None else [logprob],
            num_cached_tokens=request.num_cached if first else 0,
            prompt_logprobs=request.prompt_logprobs if first else None,
            times=request.times(now) if first else None,
        )
        params = request.params
        if token in self.eos_token_ids and not params.ignore_eos:
            return self._finish(request, "stop", now, delta)
        if token in params.stop_token_ids:
            return self._finish(request, "stop", now, delta, stop_reason=token)
        if request.grammar is not None and request.grammar.is_done:
            return self._finish(request, "stop", now, msgspec.structs.replace(delta, text_complete=True))
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
        self._leave(request)
        if request.state is State.RECEIVING:
            self.handoffs.cancel(request)
        else:
            self._release(request)
        self.handoffs.leased.pop(request.request_id, None)
        request.state = State.FINISHED
        del self._live[request.request_id]
        self.totals.finished[reason] += 1
        self.metrics.ended(request, reason, now)
        if request.ticket is None:
            why = f" ({error})" if error else ""
            self._note(request, f"ended: {reason}{why}, {request.num_output} output tokens")
        logger.debug(
            "request ended request_id=%s reason=%s output_tokens=%d", request.request_id, reason, request.num_output
        )
        last = TokenDelta(
            request_id=request.request_id,
            position=delta.position if delta else request.num_output,
            token_ids=delta.token_ids if delta else [],
            logprobs=delta.logprobs if delta else None,
            prompt_logprobs=delta.prompt_logprobs if delta else None,
            num_cached_tokens=delta.num_cached_tokens if delta else 0,
            finish_reason=reason,
            stop_reason=stop_reason,
            text_complete=delta.text_complete if delta else False,
            error=ErrorInfo.of(error) if error else None,
            times=request.times(now),
            num_preemptions=request.num_preemptions,
        )
        return Event(request, last)

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._planned or self.handoffs.receiving)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.compiling)

    @property
    def live_ids(self) -> Iterable[str]:
        """Of all requests and tickets that have not ended."""
        return self._live.keys()

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
        reserved = [*self.handoffs.receiving.values(), *(r for r in self.waiting if r.blocks)]
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
            blocks_reserved=pool.exclusive(r.blocks for r in reserved),
            blocks_leased=pool.exclusive(r.blocks for r in self.handoffs.leased.values()),
            receiving=len(self.handoffs.receiving),
            leased=len(self.handoffs.leased),
            queued_tokens=sum(r.queued_tokens for r in [*self.waiting, *self.running]),
            prefill_decisions=self.handoffs.decisions(),
        )

    def check(self) -> None:
        """Raise AssertionError if requests, slots and blocks do not add up."""
        self.pool.check()
        handoffs = self.handoffs
        received = [r for r in self.waiting if r.blocks]
        holders = [*self.running, *received, *handoffs.receiving.values(), *handoffs.leased.values()]
        held = Counter(block for request in holders for block in request.blocks)
        assert held == Counter({b: n for b, n in enumerate(self.pool.refs()) if n}), "blocks held by nobody"
        receiving = [r for r in handoffs.receiving.values() if r.state is not State.FINISHED]
        live = {
            State.RUNNING: self.running,
            State.WAITING: self.waiting,
            State.COMPILING: list(self.compiling),
            State.RECEIVING: receiving,
            State.LEASED: list(handoffs.leased.values()),
        }
        assert len(self._live) == sum(map(len, live.values())), "a request is lost"
        for state, requests in live.items():
            assert all(request.state is state for request in requests), f"a request that is {state.value} is not"
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._slots) == list(range(self.config.max_num_seqs)), "a slot is lost"
        assert all(r.pending == 1 for r in received), "a waiting request holds blocks without KV"
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
        masks = {
            i: request.grammar.mask()
            for i, request in enumerate(self.requests)
            if request.grammar is not None and self._samples[i]
        }
        lists = self._slots, self._starts, self._counts, self._samples
        return StepPlan(step, self.added, self.blocks, *lists, list(masks), b"".join(masks.values()))
