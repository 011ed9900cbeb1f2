"""Speculative decoding in the scheduler: which tokens are drafted for whom, and what becomes of them. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from engine.config import SpeculativeConfig
from engine.core.request import Request
from engine.spec_decode.draft_length import OPTIMISM, SequenceDrafts, StepDrafts
from engine.spec_decode.drafter import HostDrafter
from engine.wire.messages import SpecDecodeStats


class Speculator:
    """Drafts tokens for the decoding requests of one scheduler.

    A request is not planned ahead where drafts may follow the token in flight, and where drafts are being verified. Any
    other one is, as ever.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: HostDrafter | None,
        step_cost: Callable[[], tuple[float, float]],
        vocab_size: int,
    ):
        """drafter: None if the runner has one with weights.
        step_cost: seconds of a step that only decodes, fixed and per token."""
        self._limit, self._drafter = config.num_speculative_tokens, drafter
        self._step_cost, self._vocab_size = step_cost, vocab_size
        self._step = self._undrafted = StepDrafts(0, 0.0, 0.0)
        self.totals = SpecDecodeStats()

    @property
    def lookahead(self) -> int:
        """Tokens after its drafts for which a request should have blocks: a drafter with weights computes their KV."""
        return self._limit if self._drafter is None else 0

    def num_drafts(self, requests: list[Request]) -> int:
        """Return how many tokens a drafter with weights is to propose for each of these requests after this step."""
        if self._drafter is not None or not self._undrafted.length(OPTIMISM, 1):
            return 0
        best = max(self._drafts_of(request).acceptance(len(request.tokens)) for request in requests)
        return self._undrafted.length(best, self._limit)

    def start_step(self, sequences: int) -> None:
        """sequences: those that run."""
        cost = self._step_cost()
        self._step, self._undrafted = StepDrafts(sequences, *cost), StepDrafts(sequences, *cost)

    def waits(self, request: Request) -> bool:
        """Return whether a request should wait for its token in flight, since drafts may follow that."""
        drafts = self._drafts_of(request)
        count = self._length(request, drafts, self._limit)
        # the first is a guess of the token in flight
        return count > 0 and (drafts.drafter is None or len(self._proposed(drafts, count + 1)) > 1)

    def draft(self, request: Request, room: int) -> list[int]:
        """Return up to `room` tokens that may follow the newest one of a request."""
        drafts = self._drafts_of(request)
        grammar = request.grammar
        if grammar is None:
            return self._proposed(drafts, self._length(request, drafts, min(room, self._limit)))
        room = min(room, len(grammar.drafts))  # chosen as its masks were computed
        return grammar.drafts[: self._left(request, room) if grammar.forced else self._length(request, drafts, room)]

    def guess(self, request: Request) -> list[int]:
        """Return what `draft` would, for the masks of a grammar."""
        drafts = self._drafts_of(request)
        return self._proposed(drafts, self._length(request, drafts, self._limit))

    def planned(self, request: Request, count: int) -> None:
        """Record that the next step verifies so many drafts of a request."""
        drafts = self._drafts_of(request)
        drafts.in_flight = count
        self._step.add(drafts.acceptance(len(request.tokens)), count)

    def verified(self, request: Request, accepted: int, proposed: list[int]) -> int:
        """Record the outcome for a request. Returns how many of its drafts in flight were rejected.

        proposed: by a drafter with weights, tokens that may follow the newest one.
        """
        drafts = self._drafts_of(request)
        drafted, drafts.in_flight, drafts.proposed = drafts.in_flight, 0, proposed
        if drafted:
            if request.grammar is None or not request.grammar.forced:
                drafts.record(drafted, accepted, len(request.tokens) + accepted)
            self.totals.observe(drafted, accepted)
        return drafted - accepted

    def finish(self, request: Request) -> None:
        """Learn from a request that has ended."""
        drafts = request.drafts
        if drafts is not None and drafts.num_drafted:
            request.note(f"{drafts.num_accepted} of {drafts.num_drafted} drafted tokens were accepted")
        if self._drafter is not None:
            self._drafter.finish(request.tokens, request.num_prompt)

    def _drafts_of(self, request: Request) -> SequenceDrafts:
        if request.drafts is None:
            request.drafts = SequenceDrafts(None if self._drafter is None else self._drafter.follow(request.tokens))
        return request.drafts

    def _length(self, request: Request, drafts: SequenceDrafts, limit: int) -> int:
        """Return how many tokens are worth drafting."""
        length, limit = len(request.tokens), self._left(request, limit)
        acceptance = drafts.acceptance(length)
        count = self._step.length(acceptance, limit)
        if acceptance and limit and not count and self._step.length(OPTIMISM, 1):
            drafts.pause(length)  # its own rate of acceptance is to blame, not the load
        return count

    def _left(self, request: Request, limit: int) -> int:
        """Return how many tokens a request may still get before its last, which is never a draft; `limit` at most."""
        return max(0, min(limit, request.max_tokens - request.num_output - request.in_flight - 1))

    def _proposed(self, drafts: SequenceDrafts, count: int) -> list[int]:
        if not count:
            return []
        proposed = drafts.proposed if drafts.drafter is None else drafts.drafter.propose(count)
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, proposed[:count]))
