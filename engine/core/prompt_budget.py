"""How many tokens of prompts a step computes, and of which prompts first. Pure Python: no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.core.door.kernel import ModelLimits
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.engine_options import EngineOptions
from engine.wire.plan import StepPlan

LEAST_SHARE = 64  # a step has room for 1/64 of `max_num_batched_tokens` in prompts, however long that takes
OLDEST_SHARE = 4  # the oldest prompt gets at least 1/4 of what a step has for prompts
LONG_SHARE = 25  # a prompt is long from 1/25 of `max_model_len` on, as in vLLM, if no option says from where on
HASTE = 2  # a prompt comes first once twice the time that it still takes is left until its first token is due
PACE_SHARE = 4  # 1/4 of `max_num_batched_tokens` in prompts has as much weight in the pace as all steps before


class PromptBudget:
    """Divides what decoding leaves of a step among prompts (docs/scheduling.md): those with the fewest tokens left come
    first, but a share is kept for the oldest, so that every prompt ends.

    A step with prompts is to take at most `max_prefill_step_s` seconds. How many tokens that are is learned from the
    steps before; until then only tokens count.
    """

    def __init__(self, config: EngineOptions, kv_cache: KVCacheManager, limits: ModelLimits):
        self._config, self._kv_cache = config, kv_cache
        self._whole = not limits.chunked_prefill
        self._max_s = 0.0 if self._whole else config.max_prefill_step_s
        #: Tokens for which a step has room in any case.
        self.least = max(kv_cache.pool.block_size, config.max_num_batched_tokens // LEAST_SHARE, limits.longest_span)
        threshold = 0 if self._whole else config.long_prefill_token_threshold
        self._threshold = max(threshold, limits.longest_span) if threshold else config.max_num_batched_tokens
        self._long = config.long_prefill_token_threshold or limits.max_model_len // LONG_SHARE
        self._pace = 0.0  # seconds of a step with prompts per token in it, recently; 0 while unknown

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that took so many seconds."""
        tokens = plan.num_tokens
        prompts = tokens - len(plan.counts) - sum(map(len, plan.drafts.values()))
        if prompts > 0 and seconds > 0:
            weight = prompts / (prompts + self._config.max_num_batched_tokens / PACE_SHARE) if self._pace else 1.0
            self._pace += weight * (seconds / tokens - self._pace)

    def tokens(self, left: int) -> int:
        """Return how many tokens of prompts a step may compute. left: those of `max_num_batched_tokens` that decoding
        leaves."""
        if not self._pace or not self._max_s:
            return left
        decodes = self._config.max_num_batched_tokens - left
        return min(left, max(self.least, int(self._max_s / self._pace) - decodes))

    def left_of(self, request: Request) -> int:
        """Return how many tokens of a request are left to compute; of one without blocks, how many the prefix cache
        lacked when it was last looked for there."""
        if request.tables:
            return request.pending
        if not request.expected:
            request.expected = max(1, request.pending - self._kv_cache.likely_hit(request))
        return request.expected

    def ranked(self, prompts: Iterable[Request], now: float) -> list[Request]:
        """Return prompts in the order in which they are computed: by priority, then those that are in a hurry, by when
        they are due, and then by how many tokens are left of the prompt and of those of its client that are shorter. So
        nobody gains by cutting work into many requests."""
        found = sorted(((r.order[0], self.left_of(r), r.order[1], r) for r in prompts), key=lambda row: row[:3])
        ahead, ranks = Counter[tuple[int, str]](), []
        for priority, left, arrival, request in found:
            ahead[priority, request.client] += left
            ranks.append((priority, self._due(request, left, now), ahead[priority, request.client], arrival, request))
        return [request for *_, request in sorted(ranks, key=lambda row: row[:4])]

    def _due(self, request: Request, left: int, now: float) -> float:
        """Return when the client wants the first token, if there is just time for that; else infinity."""
        by = request.clock.first_token_by if request.clock.first_token_at is None else math.inf
        takes_s = left * self._pace + self._max_s  # and the step that runs when it arrives
        return by if now < by <= now + HASTE * takes_s else math.inf

    def kept_for(self, oldest: Request, tokens: int) -> int:
        """Return how many of a step's tokens for prompts are kept for the oldest one."""
        places = oldest.prefix.places
        is_whole = self._whole or (places and oldest.computed < places[-1][1])  # an image may need all of its tokens
        return min(oldest.pending, tokens if is_whole else -(-tokens // OLDEST_SHARE))

    def needed(self, request: Request) -> int:
        """Return how many tokens a step needs room for so that a request can start."""
        return len(request.tokens) if self._whole else 1

    def is_overdue(self, request: Request) -> bool:
        """Return whether later requests may start only after this one: it has run before, or has been overtaken by as
        many tokens as it has itself."""
        return request.num_preemptions > 0 or request.overtaken >= len(request.tokens)

    def chunk(self, request: Request, room: int, *, alone: bool) -> int:
        """Return how many tokens of a prompt a step with so much room computes; none of one that must be computed at
        once and does not fit. alone: whether the engine has no other request, so that a long prompt holds up nobody."""
        if self._whole and request.pending > room:
            return 0
        count = min(request.pending, room)
        return count if alone else min(count, self._threshold)

    def may_be_partial(self, request: Request, running: Sequence[Request]) -> bool:
        """Return whether one more prompt may be computed partially. running: prompts that are being computed."""
        most, most_long = self._config.max_num_partial_prefills, self._config.max_long_partial_prefills
        if most is not None and sum(other.pending > 1 for other in running) >= most:
            return False
        if most_long is None or self.left_of(request) <= self._long:
            return True
        return sum(other.pending > max(1, self._long) for other in running) < most_long
