"""Speculative decoding in the scheduler: decides which requests get drafts, and counts how many are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import islice, takewhile

from engine.core.door.kernel import Kernel
from engine.core.door.part import Part
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.step_plan_builder import StepPlanBuilder
from engine.errors import ServingError
from engine.options.speculation import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from engine.parts.speculation.draft_totals import DraftTotals
from engine.spec_decode.draft_length import OPTIMISM, SequenceDrafts, StepDrafts
from engine.spec_decode.drafter import HostDrafter, SequenceDrafter
from engine.spec_decode.predicted_text import PredictedText
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import Prediction, SpecDecodeStats, Verified
from engine.wire.plan import ON_DEVICE, StepPlan
from engine.wire.remote_request import RemoteRequest

LOADED = 0.25  # if drafts pay only above this acceptance rate, the engine is so loaded that they gain little

MANY = 0.25  # share of the requests with drafts in flight for which the others wait; a guess, not measured on a GPU


DRAFTS = "speculation"  # in Request.of: its SequenceDrafts


def any_number(position: int) -> int:
    return MAX_SPECULATIVE_TOKENS


def unwatched(drafter: SequenceDrafter) -> SequenceDrafter:
    return drafter


class Speculator(Part):
    """Drafts tokens for the decoding requests of one scheduler.

    A request is not planned ahead while its drafts are being verified, or while drafts may follow its token in flight.
    """

    asks = Prediction
    _kv_cache: KVCacheManager
    _max_model_len: int

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: HostDrafter | None,
        step_cost: Callable[[int], tuple[float, float, float]],
        vocab_size: int,
        max_drafts: Callable[[int], int] = any_number,
        *,
        stages: int = 1,
    ):
        """drafter: None if a drafter with weights runs in the model runner.
        step_cost: DraftCost.of; takes the number of sequences.
        max_drafts: returns how many drafts may follow the token at a position in one step.
        stages: of the pipeline, which different requests have to fill."""
        self._limit, self._drafter, self._stages = config.num_speculative_tokens, drafter, stages
        self._step_cost, self._vocab_size, self._max_drafts = step_cost, vocab_size, max_drafts
        self._cost = 0, 0.0, 0.0, 0.0
        self._step = self._undrafted = StepDrafts(*self._cost)
        self._num_proposed = 0  # per request, in the step planned last
        self.totals = DraftTotals()
        #: Called with each new drafter of a sequence; returns the one to use.
        self.watch: Callable[[SequenceDrafter], SequenceDrafter] = unwatched

    @property
    def has_weights(self) -> bool:
        """Whether the drafter has weights and proposes tokens in the runner's steps."""
        return self._drafter is None

    @property
    def lookahead(self) -> int:
        """Tokens after the drafts for which a request needs blocks: a drafter with weights writes their KV."""
        return self._limit if self.has_weights else 0

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._kv_cache, self._max_model_len = kernel.kv_cache, kernel.limits.max_model_len

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        prediction = asked.record(Prediction)
        request.of[DRAFTS] = SequenceDrafts(prediction.tokens if prediction is not None else [])

    def planned(self, plan: StepPlanBuilder, step: int) -> None:
        """Decide how many tokens a drafter with weights should propose per request at the end of this step."""
        self._num_proposed = 0
        if self._drafter is None and self._undrafted.length(OPTIMISM, 1):
            drafted = [r for r in plan.requests if not (r.leaving or r.of[DRAFTS].prediction)]
            sequences = [(self._start(request), len(request.tokens)) for request in drafted]
            self._num_proposed = self._undrafted.num_proposals(sequences, self._limit)
        plan.num_drafts = self._num_proposed

    def may_plan(self, planned: Iterable[tuple[StepPlan, list[Request]]], running: int) -> bool:
        """Return False if the next step should be planned only after those in flight.

        A request cannot be planned while its drafts are verified. If all others were, these two groups would run in
        turns from then on, each with half of the rows, and a step reads all weights for them. To wait costs the time
        that the host takes to plan, and nothing while a drafter with weights runs.
        """
        drafted = sum(len(plan.drafts) for plan, _ in planned) if self._stages == 1 else 0
        return not (drafted > 0 and (self.has_weights or drafted >= MANY * running))

    def start_step(self, sequences: int) -> None:
        cost = sequences, *self._step_cost(sequences)
        if cost != self._cost:
            self._cost, self._undrafted = cost, StepDrafts(*cost)
        self._step = self._undrafted

    def up_to(self, request: Request, count: int) -> int:
        """Return `count`, or 0 if the request should wait for its token in flight because drafts may follow it."""
        return 0 if count == 1 == request.pending and request.in_flight and self._waits(request) else count

    def _waits(self, request: Request) -> bool:
        drafts = self._start(request)
        if request.leaving or not self._pays(drafts, len(request.tokens)):
            return False
        # the first is a guess of the token in flight
        limit = self._left(request, self._limit)
        if drafts.drafter is None:
            return limit > 0 and self._num_proposed > 0
        return limit > 0 and len(drafts.drafter.propose(limit + 1)) > 1

    def drafts(self, request: Request, count: int, capacity: int) -> list[int]:
        if not (drafts := self.draft(request, count, capacity)):
            return drafts
        tokens = request.computed + count
        wanted = min(len(drafts) + self.lookahead, self._max_model_len - tokens)
        self._kv_cache.grow(request, tokens + wanted)  # or as many as there are blocks for
        drafts = drafts[: request.capacity - tokens]
        self.verifies(request, len(drafts))
        return drafts

    def draft(self, request: Request, count: int, capacity: int) -> list[int]:
        """Return up to `capacity` drafts for a step that computes `count` tokens of a request; none unless the step
        computes just its newest token."""
        if not count == 1 == request.pending or request.in_flight:
            return []
        if (constraint := request.constraint) is None:
            return self._guess(request, capacity)
        drafts = constraint.drafts[: self._left(request, capacity)]  # guessed when their masks were computed
        if constraint.forced or not drafts:
            return drafts
        return drafts[: self._step.length(request.of[DRAFTS].acceptance(len(request.tokens)), len(drafts))]

    def guess(self, request: Request) -> list[int]:
        """Return drafts as Part.guess says, without those that only the device knows."""
        return [token for token in self._guess(request, MAX_SPECULATIVE_TOKENS) if token != ON_DEVICE]

    def _guess(self, request: Request, capacity: int) -> list[int]:
        """Return up to `capacity` drafts as `guess` does, with those that only the device knows."""
        drafts = self._start(request)
        length, proposed = len(request.tokens), drafts.proposed
        drafts.proposed = []  # valid after this token only
        if request.leaving:  # a step that yields several tokens is no place to stop
            return []
        if not self._pays(drafts, length) or (limit := self._left(request, min(capacity, self._limit))) <= 0:
            return []
        if drafts.drafter is not None:
            proposed = list(drafts.drafter.propose(limit))
            if not proposed and self._step.least_acceptance > LOADED:
                drafts.rest(length)
        if not proposed:
            return []
        # one draft is enough to try a new request; five for each of many would make a step slow
        some, size = proposed[: 1 if drafts.untried else limit], self._vocab_size
        tokens = takewhile(lambda token: 0 <= token < size or token == ON_DEVICE, some)
        return list(islice(tokens, self._step.length(drafts.acceptance(length), limit)))

    def verifies(self, request: Request, count: int) -> None:
        """Record that the next step verifies `count` drafts of a request."""
        request.verifying = count
        if self._step is self._undrafted:
            self._step = copy(self._undrafted)
        self._step.add(request.of[DRAFTS].acceptance(len(request.tokens)), count)

    def verified(self, request: Request, accepted: int, proposed: Sequence[int]) -> int:
        """Return how many of a request's drafts in flight were rejected, and learn from it."""
        drafts: SequenceDrafts = request.of[DRAFTS]
        drafted, request.verifying, drafts.proposed = request.verifying, 0, list(proposed)
        if drafted:
            if request.constraint is None or not request.constraint.forced:
                drafts.record(drafted, accepted, len(request.tokens) + accepted)
                if drafts.prediction:
                    request.news.append(Verified(accepted, drafted - accepted))
            self.totals.observe(drafted, accepted)
        return drafted - accepted

    def ending(self, request: Request, error: ServingError | None) -> None:
        """Learn from a request that ends."""
        drafts: SequenceDrafts = request.of[DRAFTS]
        if drafts.num_drafted:
            request.note(f"{drafts.num_accepted} of {drafts.num_drafted} drafted tokens were accepted")
        if self._drafter is not None:
            self._drafter.finish(request.tokens, request.num_prompt, request.prefix.salt)

    def report(self) -> SpecDecodeStats:
        return self.totals.stats()

    def _start(self, request: Request) -> SequenceDrafts:
        """Return the drafts of a request, and set up its drafter the first time."""
        drafts: SequenceDrafts = request.of[DRAFTS]
        if not drafts.started:
            drafts.started = True
            if drafts.prediction:
                drafts.drafter = self.watch(PredictedText(drafts.prediction, request.tokens, request.num_prompt))
            elif self._drafter is not None:
                drafts.drafter = self.watch(self._drafter.follow(request.tokens, request.prefix.salt))
        return drafts

    def _pays(self, drafts: SequenceDrafts, length: int) -> bool:
        """Return whether drafting one token is expected to save time in a sequence of this length."""
        if length < drafts.resume_at:
            return False
        if drafts.acceptance(length) > self._step.least_acceptance:
            return True
        if self._step.least_acceptance < OPTIMISM:
            drafts.pause(length)  # its own rate of acceptance is to blame, not the load
        return False

    def _left(self, request: Request, limit: int) -> int:
        """Return how many drafts, up to `limit`, may follow the newest token of a request, whether that token is known
        or in flight. The last token that a request can generate is never a draft."""
        left = request.max_tokens - request.num_output - request.in_flight - 1
        return max(0, min(limit, left, self._max_drafts(len(request.tokens) + request.in_flight - 1)))
