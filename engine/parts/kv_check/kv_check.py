"""Computes some of the cached KV again that came from a tier or another engine. Pure Python."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.core.door.part import Part
from engine.core.request import PrefixUse, Request, RequestClock, State
from engine.costs.request_cost import cost_of
from engine.parts.block_source import BlockSource
from engine.parts.kept import adapter_of, images_of
from engine.parts.kv_check.messages import EQUAL, BlockPair, KVCheckStats
from engine.parts.kv_tiers.prefix_pins import pin, unpin
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import MultiModalFeatureSpec, PromptImages
from engine.wire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.core.door.kernel import Kernel
    from engine.core.step_plan_builder import StepPlanBuilder
    from engine.errors import ServingError
    from engine.wire.parts.adapter import ModelAdapter
    from engine.wire.plan import StepPlan

logger = logging.getLogger(__name__)

MAX_WAITING = 16  # sources with a block that waits for its check; beyond that the oldest are dropped
LAST = 1 << 62  # priority
NEVER = sys.maxsize
NEW_BLOCKS = 2  # that a check needs: for the block, and for a token after it
CHECKED = "kv_check"  # in Request.of: the block that a request checks


class ReadyAdapters(Protocol):
    """The adapters with which this engine can compute at once."""

    @property
    def digests(self) -> Sequence[str]: ...


@dataclass(slots=True, eq=False)
class SampledBlock:
    """A cached block that came from elsewhere, and what it takes to compute it again."""

    source: BlockSource
    kind: str
    name: str
    """Of the tier or the engine."""
    request_id: str
    """The request for which it came."""
    tokens: list[int]
    """Of the prompt, up to the end of the block."""
    hashes: list[bytes]
    """Of the blocks up to this one."""
    block: int
    salt: str
    adapter: ModelAdapter | None
    images: list[MultiModalFeatureSpec]
    """Without pixels; none has a place in the block."""


class KVCheck(Part):
    """Has the newest block of each source computed again, from the cached blocks before it, as an ordinary request of
    the lowest priority does. Ranks compare both in the same step; then the request ends, without a token.

    A check begins only if no request waits, and none has more than one token to compute: so at most the step under way
    delays a request that comes. At most one in `every` computed tokens is computed for checks, but the first block of
    each source is checked at once.
    """

    _kernel: Kernel

    def __init__(self, every: int, max_num_batched_tokens: int, adapters: ReadyAdapters | None = None):
        """adapters: None in an engine without adapters."""
        self._every, self._max_tokens, self._adapters = every, max_num_batched_tokens, adapters
        self._waiting: dict[tuple[str, str], SampledBlock] = {}  # by kind and name
        self._known: set[tuple[str, str]] = set()  # sources of which a block was checked
        self._wrong: set[tuple[str, str]] = set()
        self._request: Request | None = None  # the one that computes a block
        self._asked: dict[int, SampledBlock] = {}  # by the number of the pair
        self._owed = 0  # tokens to compute for requests before the next check
        self._num_checks = self._num_arrivals = self._tokens = 0
        self._now = 0.0
        self.checks: dict[str, Counter[str]] = {}

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._kernel = kernel

    def listen_to(self, *sources: BlockSource | None) -> None:
        """Hear of the blocks that come by these, as far as the engine has them."""
        for source in sources:
            if source is not None:
                source.arrivals = self

    @property
    def awaits(self) -> bool:
        """Whether ranks have not answered yet."""
        return bool(self._asked)

    # -- what comes ----------------------------------------------------------------------------------------

    def came(self, part: BlockSource, kind: str, name: str, request: Request, hashes: Sequence[bytes]) -> None:
        pool, source = self._kernel.kv_cache.pool, (kind, name)
        if not hashes or source in self._wrong or request.state is State.FINISHED:
            return
        self._num_arrivals += 1
        chosen = hashes[self._num_arrivals % len(hashes)]
        index, size = request.prefix.hashes.index(chosen), pool.block_size
        start, end = index * size, (index + 1) * size
        if end >= self._kernel.limits.max_model_len:
            return  # a check has one more token
        if any(offset < end and start < stop for offset, stop, _ in request.prefix.places):
            return  # its images may have to be encoded for it
        for cached in pool.match([chosen]):
            self._waiting[source] = SampledBlock(
                part,
                kind,
                name,
                request.request_id,
                request.tokens[:end],
                request.prefix.hashes[: index + 1],
                cached,
                request.prefix.salt,
                adapter_of(request),
                [image.without_pixels() for image in images_of(request) if image.mm_position.end <= start],
            )
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    # -- a check -------------------------------------------------------------------------------------------

    def update(self, now: float) -> None:
        self._now = now
        if (request := self._request) is not None and request.state is State.WAITING:  # it found no room
            self._kernel.finish(request, "abort", now)

    def start_step(self, sequences: int) -> None:
        queue, size = self._kernel.queue, self._kernel.kv_cache.pool.block_size
        due = [source for source in self._waiting if self._owed <= 0 or source not in self._known]
        if not due or self._request is not None or queue.waiting or not queue.has_free_slot:
            return
        if sequences + size > self._max_tokens or any(request.pending > 1 for request in queue.running):
            return
        for source in due:
            sampled = self._waiting.pop(source)
            request = self._request_for(sampled)
            if self._may_start(sampled, request):
                self._known.add(source)
                self._begin(sampled, request)
                return

    def _may_start(self, sampled: SampledBlock, request: Request) -> bool:
        """Return whether the block, and what it takes to compute it again, are here, so that it can be computed in the
        next step."""
        kv_cache, queue = self._kernel.kv_cache, self._kernel.queue
        there = kv_cache.pool.match(sampled.hashes)
        if len(there) < len(sampled.hashes) or there[-1] != sampled.block:
            return False
        adapters = () if self._adapters is None else self._adapters.digests
        if sampled.adapter is not None and sampled.adapter.digest not in adapters:
            return False  # to load it might take the slot of another one
        if kv_cache.in_flight(request, len(there) - 1, queue.running):
            return False
        return kv_cache.pool.can_reserve(there, NEW_BLOCKS, len(queue.live))

    def _begin(self, sampled: SampledBlock, request: Request) -> None:
        pin(self._kernel.kv_cache.pool, [sampled.block])
        size = self._kernel.kv_cache.pool.block_size
        self._request, self._owed, self._tokens = request, self._every * size, self._tokens + size
        asked = GenerateRequest(request_id=request.request_id, prompt=[])
        self._kernel.enqueue(request, asked.asking(PromptImages.of(sampled.images), sampled.adapter))

    def _request_for(self, sampled: SampledBlock) -> Request:
        self._num_checks += 1
        count = len(sampled.tokens)
        return Request(
            request_id=f"kv-check-{self._num_checks}",
            tokens=[*sampled.tokens, sampled.tokens[-1]],  # the last is not computed, so none is sampled
            num_prompt=count + 1,
            params=SamplingParams(),
            max_tokens=1,
            seed=0,
            clock=RequestClock(self._now, scheduled_at=self._now, first_token_at=self._now),  # no statistics count it
            prefix=PrefixUse(sampled.salt, hashes=list(sampled.hashes), looked_below=True),
            of={CHECKED: sampled},
            marks=[count],
            generates=False,
        )

    def opened(self, request: Request, asked: object) -> None:
        if request is self._request:
            request.order = LAST, request.order[1]
            cost_of(request).closed = True  # nobody pays for it

    def shorten(self, request: Request, matched: int, block_size: int) -> int:
        return matched if request is not self._request else min(matched, len(request.prefix.hashes) - 1)

    def up_to(self, request: Request, count: int) -> int:
        return count if request is not self._request else min(count, request.marks[0] - request.computed)

    def planned(self, plan: StepPlanBuilder, step: int) -> None:
        if (request := self._request) is None or request not in plan.requests:
            return
        request.take_timeline()
        if request.computed == request.marks[0]:
            sampled: SampledBlock = request.of[CHECKED]
            self._asked[self._num_checks] = sampled
            computed = request.tables[0].blocks[len(sampled.hashes) - 1]
            plan.attach(BlockPair(self._num_checks, computed, sampled.block))

    def step_ended(self, plan: StepPlan) -> None:
        if self._owed > 0:
            self._owed -= plan.num_tokens

    def passed(self, request: Request, computed: int, now: float) -> None:
        if request is self._request:
            request.finite = computed  # no logits tell, but nobody goes on from its blocks
            self._kernel.finish(request, "abort", now)

    def ending(self, request: Request, error: ServingError | None) -> None:
        if request is self._request:
            self._request = None
            unpin(self._kernel.kv_cache.pool, request.of[CHECKED].block)
            self._kernel.totals.finished["error" if error else "abort"] -= 1  # it was no client's

    # -- the result ----------------------------------------------------------------------------------------

    def compared(self, number: int, layer: int) -> bool:
        """Record what the ranks have found. Returns whether the block is wrong: then nothing is read any more from
        where it came from, and live requests keep what they have computed to themselves."""
        sampled = self._asked.pop(number)
        different = layer != EQUAL
        self.checks.setdefault(sampled.kind, Counter(equal=0, different=0))["different" if different else "equal"] += 1
        if not different:
            return False
        logger.error(
            "cached KV differs from what was computed again, and its source is not read any more "
            "source=%s name=%s layer=%d tokens=%d request_id=%s",
            sampled.kind, sampled.name, layer, len(sampled.tokens), sampled.request_id,
        )  # fmt: skip
        self._wrong.add((sampled.kind, sampled.name))
        sampled.source.quarantine(sampled.name)
        for request in self._kernel.queue.live.values():
            request.note(f"the prefix cache is emptied: KV from {sampled.kind} {sampled.name} was wrong")
            for table in request.tables:
                table.next_full = NEVER
        return True

    def cleared(self) -> None:
        self._waiting.clear()

    def report(self) -> KVCheckStats:
        return KVCheckStats({kind: dict(results) for kind, results in self.checks.items()}, self._tokens)
