"""The scheduler: decides what each step computes. Pure Python: no torch, no clock, no socket."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.encoder_cache_manager import TEXT_ONLY, EncoderCacheManager
from engine.core.handoffs import HandoffManager
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.core.speculator import Speculator
from engine.core.stats import RequestMetrics, SchedulerStats
from engine.core.step_plan_builder import StepPlanBuilder
from engine.errors import EngineError, EngineUnavailable, InvalidParameter, Overloaded, PromptTooLong, ServingError
from engine.kv_transfer.protocol.events import Closed, Failed, HandoffEvent, Noted, Received
from engine.wire.messages import (
    EngineLoad,
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.plan import StepPlan, StepResult
from engine.wire.remote_prefill import RemotePrefillRequest

if TYPE_CHECKING:
    from engine.text.grammar import Grammar

logger = logging.getLogger(__name__)

NO_TOKEN = "no token can be sampled: all are banned, or the model's logits are not finite"
NOT_FINITE = "the model's hidden states are not finite"


class Event(msgspec.Struct, frozen=True, gc=False):
    """Output of a step for the client of a request."""

    request: Request
    delta: TokenDelta


class Scheduler:
    """Continuous batching without phases: every request has known tokens and computed tokens, and a step narrows the
    gap, under one token budget for all.

    `schedule` decides, `commit` records. A second step may be planned before the first is committed; the tokens that
    the first will sample are then counted as `in_flight`.

    Requests are served in `order` (priority, then arrival). Running requests come first; each leaves one token of the
    budget to every one behind it, so a long prompt never stops the others' decoding. When blocks run out, only a
    request later in the order is preempted: the first in order always makes progress, so everyone finishes.

    The KV of a prompt may come from another engine (`handoffs`). Its request holds all blocks that the prompt needs
    meanwhile, and is given a slot only when the KV is there, as if its prompt had been cached.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        handoffs: HandoffManager | None = None,
        chunked_prefill: bool = True,
        pools_all_tokens: bool = False,
        speculator: Speculator | None = None,
        encoder_cache: EncoderCacheManager | None = None,
    ):
        """chunked_prefill: a prompt may take several steps. pools_all_tokens: pooling needs every token of a prompt."""
        assert max_model_len <= pool.num_blocks * pool.block_size, "one request alone must fit the pool"
        self.config, self.pool = config, pool
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.queue = RequestQueue(config.max_num_seqs)
        self.kv_cache = KVCacheManager(pool)
        self.handoffs = handoffs or HandoffManager()
        self.speculator = speculator
        self.encoder_cache = encoder_cache
        self._chunked_prefill, self._pools_all_tokens = chunked_prefill, pools_all_tokens
        self.totals = SchedulerStats()
        self.metrics = RequestMetrics()
        #: Steps that were planned and not committed, oldest first, and the requests of their entries.
        self.planned: deque[tuple[StepPlan, list[Request]]] = deque()
        self._builder = StepPlanBuilder()
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        return bool(self.queue.live or self.planned or self.handoffs.receiving)

    # -- requests -------------------------------------------------------------------------------------------

    def add(self, message: GenerateRequest, now: float) -> Request:
        """Queue a request, or raise a ServingError and change nothing."""
        self.check_request(message)
        self._check_capacity()
        priority = message.priority if self.config.scheduling_policy == "priority" else 0
        request = Request.create(message, (priority, self._num_arrived), self.max_model_len, now)
        request.skip_reading_prefix_cache |= request.pooling is not None and self._pools_all_tokens
        return self._enqueue(request)

    def add_remote_prefill(self, prefill_request: RemotePrefillRequest, now: float) -> Request:
        """Queue a prompt to be computed for another engine, or raise a ServingError and change nothing."""
        self._check_tokens(prefill_request.token_ids, prefill_request.num_prompt)
        if prefill_request.mm_features:
            self._check_images(prefill_request.mm_features, prefill_request.token_ids[: prefill_request.num_prompt])
        prefill_request.params.check_vocabulary(self.vocab_size)
        self._check_capacity()
        return self._enqueue(Request.for_remote_prefill(prefill_request, (0, self._num_arrived), now))

    def _check_capacity(self) -> None:
        if self.queue.num_waiting >= self.config.max_waiting:
            raise Overloaded(f"{self.queue.num_waiting} requests are waiting, the limit is {self.config.max_waiting}")

    def _enqueue(self, request: Request) -> Request:
        self._num_arrived += 1
        behind, given = self.queue.num_waiting, f" and {request.num_output} output tokens" if request.num_output else ""
        request.note(f"queued behind {behind} others, with {request.num_prompt} prompt tokens{given}")
        if self.encoder_cache is not None and request.images:
            request.images = self.encoder_cache.share_pixels(request.images)
        self.queue.add(request)
        logger.debug("request queued request_id=%s prompt_tokens=%d", request.request_id, request.num_prompt)
        return request

    def set_grammar(self, request: Request, grammar: Grammar) -> None:
        """Let a request run that was waiting for its grammar."""
        self.queue.remove(request)
        request.grammar = grammar
        self.queue.wait(request)

    def check_request(self, message: GenerateRequest) -> None:
        """Raise RequestError if this request could never be served."""
        if message.request_id in self.queue.live:
            raise InvalidParameter("request_id", message.request_id, "unique among live requests")
        self._check_tokens(message.prompt, message.num_prompt, answer=message.pooling is None)
        message.params.check_vocabulary(self.vocab_size)
        given = 0 if message.num_prompt is None else len(message.prompt) - message.num_prompt
        if message.params.max_tokens is not None and given >= message.params.max_tokens:
            raise InvalidParameter("max_tokens", message.params.max_tokens, f"above the {given} that are given already")
        if message.mm_features:
            self._check_images(message.mm_features, message.prompt[: message.num_prompt])
        whole = message.params.prompt_logprobs is not None or message.pooling is not None
        if message.prefill == "remote" and (whole or not self.handoffs.decides):
            raise InvalidParameter("prefill", message.prefill, "auto or local where no other engine computes prompts")

    def _check_images(self, images: list[MultiModalFeatureSpec], prompt: list[int]) -> None:
        if self.encoder_cache is None:
            raise InvalidParameter("mm_features", len(images), TEXT_ONLY)
        self.encoder_cache.check_images(images, prompt)

    def _check_tokens(self, tokens: list[int], num_prompt: int | None, answer: bool = True) -> None:
        if not tokens:
            raise InvalidParameter("prompt", tokens, "at least one token")
        if len(tokens) + answer > self.max_model_len:
            raise PromptTooLong(len(tokens), self.max_model_len, answer=answer)
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter("prompt", token, f"token ids from 0 to {self.vocab_size - 1}")
        if num_prompt is not None and not 1 <= num_prompt <= len(tokens):
            raise InvalidParameter("num_prompt", num_prompt, f"between 1 and the length of the prompt ({len(tokens)})")

    def abort(
        self, request_id: str, now: float, error: ServingError | None = None, *, reason: FinishReason = "abort"
    ) -> Event | None:
        """End a request now and free what it holds. None if it is not live (it may just have finished), or if it is
        computed for another engine: that one is told, and ends it when it no longer reads the blocks."""
        request = self.queue.live.get(request_id)
        if request is None:
            return None
        if request.prefill_request is not None:
            if request.state is not State.LEASED:
                self._retire(request)
            self.handoffs.refuse(request, "cancelled" if error is None else str(error))
            return None
        return self._finish(request, "error" if error else reason, now, error=error)

    # -- plan ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed now."""
        before = self.totals.preemptions
        budget = self._plan_running()
        # while blocks run out nobody starts, unless that ended the last running request: the next in order then goes on
        if self.totals.preemptions == before or not self._builder.requests:
            self._admit(budget, now)
        if not self._builder.requests:
            return None
        self.totals.steps += 1
        requests = self._builder.requests
        num_drafts = 0 if self.speculator is None else self.speculator.num_drafts(requests)
        images = ([], [], []) if self.encoder_cache is None else self.encoder_cache.take_changes()
        plan = self._builder.plan(self.totals.steps, self.kv_cache.take_changes(), num_drafts, *images)
        self.metrics.observe_step(plan.num_tokens)
        self.planned.append((plan, requests))
        self._builder = StepPlanBuilder()
        return plan

    def _plan_running(self) -> int:
        """Plan all running requests, in order. Returns the budget left for new ones."""
        budget, block_size = self.config.max_num_batched_tokens, self.pool.block_size
        queue = list(self.queue.running)
        if self.speculator is not None:
            self.speculator.start_step(len(queue))
        for behind, request in zip(range(len(queue) - 1, -1, -1), queue, strict=True):
            if request.state is not State.RUNNING or request.verifying or request.waiting_for_grammar:
                continue  # the first of these were preempted by one before them
            pending, drafts = request.pending, None
            count = pending if pending <= budget - behind else budget - behind
            if request.images:
                count = self._up_to_images(request, count)
            if self.speculator is not None and pending == 1 == count:
                if request.in_flight == 0:
                    drafts = self.speculator.draft(request, budget - behind - count)
                elif self.speculator.waits(request):
                    continue
            tokens = request.computed + count
            if count > 0 and (tokens <= len(request.blocks) * block_size or self._grow(request, tokens)):
                if self.speculator is not None and drafts:
                    wanted = min(len(drafts) + self.speculator.lookahead, self.max_model_len - tokens)
                    drafts = drafts[: self.kv_cache.room(request, tokens, wanted)]
                    self.speculator.planned(request, len(drafts))
                    budget -= len(drafts)
                self._builder.compute(request, count, drafts)
                budget -= count
        return budget

    def _admit(self, budget: int, now: float) -> None:
        """Start waiting requests, strictly in order, while budget, slots and blocks last."""
        for request in list(self.queue.waiting):
            if request.in_flight:
                return  # it was preempted, and its last token has not arrived yet
            if request.waiting_for_grammar:
                continue  # its next mask is still being computed, which may take long
            needed = 1 if self._chunked_prefill else len(request.tokens)
            startable = budget >= needed and self.queue.has_free_slot
            if not request.blocks and not self._reserve(request, startable, now):
                return
            if startable and request.state is State.WAITING:
                budget -= self._start(request, budget)

    def _reserve(self, request: Request, startable: bool, now: float) -> bool:
        """Decide where a prompt is computed, and give the request its blocks: it then waits for a slot, or for its KV
        from another engine. False if it has to wait, for blocks, a slot or a prefix that another request computes, and
        everyone behind it with it."""
        if not startable and not self.handoffs.decides:
            return False
        matched = self._match(request)
        if self.kv_cache.in_flight(request, len(matched), self.queue.running):
            return False
        cached = len(matched) * self.pool.block_size
        decision = self.handoffs.decide(request, cached, self.queue.running)
        if not (startable or decision.remote) or not self._reserve_blocks(request, matched, decision.remote):
            return False
        self.handoffs.count(decision)
        self._count_scheduled(request, cached, now)
        where = "by a prefill engine" if decision.remote else "here"
        why = f": {decision.reason}" if decision.reason else ""
        request.note(f"to be computed {where}{why}; {cached} of {len(request.tokens)} tokens are cached")
        if decision.remote:
            self.queue.remove(request)
            request.state = State.WAITING_FOR_REMOTE_KV
            request.handoff_at = (now, now)
            self.handoffs.open(request, cached, now, self.pool.block_size)
        else:
            request.computed = cached
        return True

    def _start(self, request: Request, budget: int) -> int:
        """Move a request that holds its blocks into a slot, and plan its first tokens. Returns how many."""
        self.queue.run(request)
        self._builder.add_sequence(request)
        self.kv_cache.add_sequence(request)
        if request.prefill_request is not None:
            self.handoffs.report(request, request.computed, self.pool.block_size)
        count = min(request.pending, budget)
        if request.images:
            count = self._up_to_images(request, count)
        if count > 0:
            self._builder.compute(request, count)
        return count

    def _up_to_images(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request come before the first image that has to wait for
        another step: to be encoded, or to be computed whole."""
        assert self.encoder_cache is not None
        start = request.computed
        images = [image for image in request.images if start < image.mm_position.end]
        for image in images:
            place = image.mm_position
            if place.offset < start + count:
                is_cut = self.encoder_cache.whole_images and place.end > start + count
                if is_cut or not self.encoder_cache.take(image, request.note):
                    count = max(0, place.offset - start)
        self.encoder_cache.ask_ahead(images, request.note)
        return count

    def _match(self, request: Request) -> list[int]:
        """Return the cached blocks that a request begins with. If images are computed whole, they end in none."""
        matched, size = self.kv_cache.match(request), self.pool.block_size
        if self.encoder_cache is not None and self.encoder_cache.whole_images:
            for image in reversed(request.images):
                place = image.mm_position
                if place.offset < len(matched) * size < place.end:
                    matched = matched[: place.offset // size]
        return matched

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

    # -- blocks --------------------------------------------------------------------------------------------

    def _reserve_blocks(self, request: Request, matched: list[int], remote: bool) -> bool:
        """Give a request blocks for all its known tokens. Requests behind it that only wait for a slot lose theirs."""
        # one token more if the first token comes with the KV: then nothing is missing when there is a slot
        tokens = len(request.tokens) + remote
        while True:
            with_kv = self.queue.waiting_with_kv
            # one block for each request that will grow: to start one only to preempt another would be work done twice
            growing = sum(r.prefill_request is None for r in self.queue.running)
            watermark = growing + len(with_kv) + len(self.handoffs.receiving)
            if self.kv_cache.reserve(request, matched, tokens, watermark):
                return True
            if not with_kv or with_kv[-1].order < request.order:
                return False
            self._preempt(with_kv[-1])

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give a request blocks for `tokens` tokens, preempting others if needed; False if it was preempted itself."""
        while not self.kv_cache.grow(request, tokens):
            victim = self._victim(request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _victim(self, request: Request) -> Request:
        """Choose among the requests behind `request` one that only waits for a slot, then the cheapest to compute
        again, then the newest. Not one that is computed for another engine, which reads its blocks."""
        num_unshared, waiting = self.pool.num_unshared, State.WAITING
        behind = [r for r in [*self.queue.running, *self.queue.waiting_with_kv] if r.order > request.order]
        victims = [r for r in behind if r.prefill_request is None and num_unshared(r.blocks)]
        return max(victims, key=lambda r: (r.state is waiting, -num_unshared(r.blocks), r.order), default=request)

    def _preempt(self, request: Request) -> None:
        unshared = self.pool.num_unshared(request.blocks)
        logger.info("preempted request_id=%s computed_tokens=%d unshared_blocks=%d times=%d",
                    request.request_id, request.computed, unshared, request.num_preemptions + 1)  # fmt: skip
        request.note(f"preempted, since blocks ran out; {request.computed} computed tokens are given up")
        self.queue.remove(request)
        self.kv_cache.release(request)
        self.queue.wait(request)
        request.num_preemptions += 1
        self.totals.preemptions += 1

    # -- results -------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Record the result of the oldest planned step. Returns one event per request that got a token."""
        plan, requests = self.planned.popleft()
        if self.encoder_cache is not None:
            self.encoder_cache.release(plan.received)
        assert plan.step == result.step, f"step {result.step} came back, step {plan.step} was expected"
        events: list[Event] = []
        columns = zip(requests, plan.starts, plan.counts, result.tokens, result.logprobs, strict=True)
        for i, (request, start, count, tokens, logprobs) in enumerate(columns):
            running = request.state is State.RUNNING
            if not running and request.state in (State.FINISHED, State.LEASED):
                continue  # ended after this step was planned
            computed = start + count
            if self.speculator is not None and tokens and (i in plan.drafts or self.speculator.has_weights):
                rejected = self.speculator.verified(request, len(tokens) - 1, result.drafts.get(i, []))
                computed -= rejected
                request.computed -= rejected if running else 0
            if running:
                self.kv_cache.cache_blocks(request, computed)
            if result.prompt_logprobs[i]:
                self._collect_prompt_logprobs(request, start, result.prompt_logprobs[i])
            if request.prefill_request is not None:
                self._report(request, computed, tokens, logprobs)
            elif tokens:
                events.append(self.append_tokens(request, tokens, logprobs, now))
            elif i in result.pooled:
                events.append(self._finish_pooling(request, result.pooled[i], now))
        self.metrics.observe_tokens([event.request for event in events if event.delta.token_ids], now)
        return events

    def append_tokens(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None, now: float
    ) -> Event:
        """Record the sampled tokens of a step, and end the request at the first that ends it. Their time is for the
        caller to observe, of all requests of a step together."""
        request.in_flight -= 1
        if tokens[0] < 0:
            self.kv_cache.distrust(request)
            error: ServingError = EngineError(request.request_id, NO_TOKEN)
            if request.grammar is not None and request.grammar.error is not None:
                assert request.params.structured_outputs is not None
                error = request.params.structured_outputs.invalid(f"simple enough to follow ({request.grammar.error})")
            return self._finish(request, "error", now, error=error)
        first = request.first_token_at is None
        if first:
            request.first_token_at = now
            request.note("first token")
        position, reason = request.num_output, None
        for count, token in enumerate(tokens, 1):
            request.tokens.append(token)
            if request.grammar is not None:
                request.grammar.accept(token)
            if reason := self._reason_to_end(request, token, position + count):
                break
        if len(tokens) > 1 and request.state is State.RUNNING:
            self.kv_cache.cache_blocks(request, request.computed)
        self.totals.generation_tokens += count
        delta = TokenDelta(request_id=request.request_id, position=position, token_ids=tokens[:count])
        if request.prediction and request.drafts is not None:
            delta = msgspec.structs.replace(delta, prediction_tokens=request.drafts.take_verified())
        if first or logprobs or request.timeline:
            delta = msgspec.structs.replace(
                delta,
                logprobs=None if logprobs is None else logprobs[:count],
                num_cached_tokens=request.num_cached if first else 0,
                prompt_logprobs=request.prompt_logprobs if first else None,
                times=request.times(now) if first else None,
                timeline=request.take_timeline(),
            )
        if reason is None:
            if request.grammar is not None:
                speculator = self.speculator
                request.grammar.start_masks(None if speculator is None else speculator.guess(request) or [])
            return Event(request, delta)
        if reason == "stop" and (token not in self.eos_token_ids or request.params.ignore_eos):
            if token in request.params.stop_token_ids:
                return self._finish(request, reason, now, delta, stop_reason=token)
            delta = msgspec.structs.replace(delta, text_complete=True)
        return self._finish(request, reason, now, delta)

    def _reason_to_end(self, request: Request, token: int, num_output: int) -> FinishReason | None:
        """Return why a request ends with this token, its newest; None if it goes on."""
        params = request.params
        if (token in self.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        if request.grammar is not None and request.grammar.is_done:
            return "stop"
        return "length" if num_output >= request.max_tokens else None

    def _finish_pooling(self, request: Request, pooled: bytes, now: float) -> Event:
        if not pooled:
            self.kv_cache.distrust(request)
            return self._finish(request, "error", now, error=EngineError(request.request_id, NOT_FINITE))
        delta = TokenDelta(request_id=request.request_id, pooled=pooled, num_cached_tokens=request.num_cached)
        return self._finish(request, "stop", now, delta)

    def _collect_prompt_logprobs(self, request: Request, start: int, rows: list[TokenLogprob] | None) -> None:
        known = request.prompt_logprobs
        if rows and known is not None and len(known) >= start + 1:  # fewer only if computed again after preemption
            known.extend(rows[len(known) - start - 1 :])

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
        """End a request: the one place where a request stops being live."""
        self.queue.remove(request)
        if request.state is State.WAITING_FOR_REMOTE_KV:
            self.handoffs.cancel(request)
        else:
            self.kv_cache.release(request)
        self.handoffs.leased.pop(request.request_id, None)
        request.state = State.FINISHED
        del self.queue.live[request.request_id]
        self.totals.finished[reason] += 1
        self.metrics.observe_finished(request, reason, now)
        if self.speculator is not None:
            self.speculator.finish(request)
        if request.prefill_request is None:
            why = f" ({error})" if error else ""
            request.note(f"ended: {reason}{why}, {request.num_output} output tokens")
        logger.debug(
            "request ended request_id=%s reason=%s output_tokens=%d", request.request_id, reason, request.num_output
        )
        last = msgspec.structs.replace(
            delta or TokenDelta(request_id=request.request_id, position=request.num_output),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=ErrorInfo.of(error) if error else None,
            times=request.times(now),
            num_preemptions=request.num_preemptions,
            timeline=[*(delta.timeline if delta else ()), *request.take_timeline()],
        )
        return Event(request, last)

    def take_timelines(self, before: float) -> list[Event]:
        """Return deltas without a token for requests with events from before `before` (seconds since 1970)."""
        return [
            Event(r, TokenDelta(request_id=r.request_id, position=r.num_output, timeline=r.take_timeline()))
            for r in self.queue.live.values()
            if r.timeline and r.timeline[0].at < before and r.prefill_request is None
        ]

    # -- handoffs ------------------------------------------------------------------------------------------

    def handle(self, event: HandoffEvent, now: float) -> list[Event]:
        """Record the progress of a handoff."""
        match event:
            case Noted():
                if event.request_id in self.queue.live:
                    self.queue.live[event.request_id].timeline.append(event.what)
                return []
            case Closed():
                request = self.queue.live[event.handoff_id]
                return [self._finish(request, "length" if event.reason == "released" else "abort", now)]
            case Received():
                request = self.handoffs.received(event, now)
                verified = len(request.tokens)
            case Failed():
                request = self.handoffs.failed(event.handoff_id, event.retry)
                verified = event.verified
        request.handoff_at = request.handoff_at and (request.handoff_at[0], now)
        self.kv_cache.cache_blocks(request, verified)
        if request.state is State.FINISHED:
            self.kv_cache.release(request)
            return []
        self.queue.wait(request)
        if isinstance(event, Failed):
            self.kv_cache.distrust(request, request.num_cached_blocks)  # the other engine's logits may not be finite
            self.kv_cache.release(request)
            if self.handoffs.gives_up(request):
                why = f"{event.reason} {event.detail}".rstrip()
                error = EngineUnavailable(f"no other engine could compute the prompt: {why}")
                return [self._finish(request, "error", now, error=error)]
            return []
        request.timeline += event.first.timeline
        request.computed, request.in_flight = verified, 1
        request.num_cached = max(request.num_cached, event.first.cached)
        logprobs = None if event.first.logprob is None else [event.first.logprob]
        events = [self.append_tokens(request, [event.first.token], logprobs, now)]
        self.metrics.observe_tokens([request], now)
        return events

    def _report(self, request: Request, computed: int, tokens: list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Tell the engine that asked for this prompt how much is computed. With a token, all of it is."""
        self.handoffs.report(request, computed, self.pool.block_size)
        if not tokens:
            return
        request.in_flight -= 1
        if tokens[0] < 0:
            self.kv_cache.distrust(request)
            self.handoffs.refuse(request, NO_TOKEN)
        else:
            request.note("first token computed")
            self.handoffs.finish(request, tokens[0], logprobs[0] if logprobs else None, self.pool.block_size)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Compute nothing more for it; its blocks stay until the other engine has read them."""
        self.queue.remove(request)
        request.state = State.LEASED
        self.handoffs.leased[request.request_id] = request

    # -- state ---------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        return EngineLoad(
            sequences=len(self.queue.running) + self.queue.num_waiting + len(self.handoffs.receiving),
            queued_tokens=self.queue.queued_tokens,
            blocks_used=self.pool.num_used,
            slots=self.config.max_num_seqs,
            blocks_total=self.pool.num_blocks,
            queued_embeds=0 if self.encoder_cache is None else self.encoder_cache.queued_embeds(self._pending_images()),
        )

    def _pending_images(self) -> Iterator[MultiModalFeatureSpec]:
        """Yield the images of prompts that are not computed up to their ends."""
        for request in [*self.queue.waiting, *self.queue.running]:
            for image in request.images:
                if request.computed < image.mm_position.end:
                    yield image

    def stats(self) -> EngineStats:
        queue, pool, totals = self.queue, self.pool, self.totals
        receiving, leased = self.handoffs.receiving.values(), self.handoffs.leased.values()
        return EngineStats(
            running=len(queue.running),
            waiting=queue.num_waiting,
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
            blocks_reserved=pool.num_unshared(*[r.blocks for r in [*receiving, *queue.waiting_with_kv]]),
            blocks_leased=pool.num_unshared(*[r.blocks for r in leased]),
            receiving=len(receiving),
            leased=len(leased),
            queued_tokens=queue.queued_tokens,
            prefill_decisions=self.handoffs.decisions(),
            images_encoded=0 if self.encoder_cache is None else self.encoder_cache.num_encoded,
            encoder_cache_hits=0 if self.encoder_cache is None else self.encoder_cache.num_hits,
            spec_decode=None if self.speculator is None else deepcopy(self.speculator.totals),
        )

    def check(self) -> None:
        """Raise AssertionError if requests, slots and blocks do not add up."""
        self.pool.check()
        if self.encoder_cache is not None:
            self.encoder_cache.check()
        receiving, leased = list(self.handoffs.receiving.values()), list(self.handoffs.leased.values())
        self.queue.check([r for r in receiving if r.state is not State.FINISHED], leased)
        holders = [*self.queue.running, *self.queue.waiting_with_kv, *receiving, *leased]
        held = Counter(block for request in holders for block in request.blocks)
        assert held == Counter({b: n for b, n in enumerate(self.pool.ref_counts()) if n}), "blocks held by nobody"
