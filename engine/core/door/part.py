"""A feature of the scheduler, and all features of one scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from engine.core.door.offers import Offer
from engine.core.door.outputs import Outputs
from engine.core.request import Request, State
from engine.hooks import ByClass, overriding

if TYPE_CHECKING:
    from engine.core.door.kernel import Kernel
    from engine.core.kv_cache_manager import Shorten
    from engine.core.step_plan_builder import StepPlanBuilder
    from engine.errors import ServingError
    from engine.wire.part_record import Asking, PartRecord
    from engine.wire.plan import StepPlan
    from engine.wire.token_delta import TokenDelta, TokenLogprob


class Part:
    """A feature. The scheduler calls those of the methods below that a part overrides, in the order in which the parts
    were given to it; the others cost nothing."""

    field: ClassVar[str] = ""
    """The field of a request that only this part understands."""
    asks: ClassVar[type[PartRecord] | None] = None
    """Its record in requests."""
    answers: ClassVar[bool] = False
    """Whether it answers a request that has this record, instead of tokens."""
    out: Outputs
    """Where its messages go."""

    def attach(self, kernel: Kernel) -> None:
        """Begin to serve a scheduler. Called once."""
        self.out = kernel.out

    # -- a request -----------------------------------------------------------------------------------------

    def check(self, asked: Any, prompt: Sequence[int]) -> None:
        """Raise RequestError for a request that this engine could never serve. asked: a GenerateRequest, or another
        message that a part makes requests of. prompt: without output tokens."""

    def opened(self, request: Request, asked: Any) -> None:
        """A request is queued. What the part keeps of it goes into `request.of`."""

    def may_start(self, request: Request) -> bool:
        """Return whether a waiting request may start. If not, later ones may. Earlier ones that may start have not
        started yet."""
        return True

    def shorten(self, request: Request, matched: int, block_size: int) -> int:
        """Return how many of the `matched` leading blocks of a request can be used."""
        return matched

    def offer(self, request: Request, matched: int, shorten: Shorten, watermark: int, now: float) -> Offer | None:
        """Return what this part offers a waiting request: KV that is expected to come sooner than the same tokens are
        computed here. The first `matched` blocks of the request are cached. shorten: as for KVCacheManager.match.
        watermark: blocks that must stay available."""
        return None

    def may_receive(self, request: Request) -> bool:
        """Return whether offers are wanted for a waiting request even if it could not start yet."""
        return False

    def keeps(self) -> Sequence[Request]:
        """Return the requests outside the queue that this part keeps: those that wait for KV from it, those whose
        blocks others read, and ended ones whose blocks others may still write."""
        return ()

    def reserved(self, request: Request, matched: int, now: float) -> None:
        """A request has got its blocks, of which the first `matched` were cached."""

    def progressed(
        self,
        request: Request,
        computed: int,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        error: ServingError | None,
    ) -> None:
        """The first `computed` tokens of a prompt are computed for another engine (Request.asked_by). `tokens` is empty
        until the whole prompt is computed; then it holds the first sampled token. error: why none could be sampled."""

    def let_go(self, request: Request, delta: TokenDelta, now: float) -> bool:
        """A request that is to leave (Request.leaving) has got these tokens. Returns whether it has left."""
        return False

    def cancelled(self, request: Request, reason: str) -> bool:
        """A request is aborted. Returns whether this part ends it later, once nobody reads its blocks any more."""
        return False

    def passed(self, request: Request, computed: int, now: float) -> None:
        """The first `computed` tokens of a request, and a mark within them, are in the prefix cache."""

    def started(self, request: Request) -> None:
        """A request has got a slot."""

    def stopped(self, request: Request) -> None:
        """A request has lost its slot."""

    def invalidated(self, request: Request) -> None:
        """The KV of a request may hold non-finite numbers. It still has its blocks, unless it was preempted."""

    def ending(self, request: Request, error: ServingError | None) -> None:
        """A request ends. It is out of the queue, and still has its blocks, unless it has none yet."""

    # -- what comes ----------------------------------------------------------------------------------------

    def update(self, now: float) -> None:
        """Go on with what takes time. Called before a step is planned."""

    def cleared(self) -> None:
        """The prefix cache is about to be emptied."""

    # -- a step --------------------------------------------------------------------------------------------

    def may_plan(self, planned: Iterable[tuple[StepPlan, list[Request]]], running: int) -> bool:
        """Return whether the next step may be planned before those in flight have ended. planned: these, each with the
        requests of its entries. running: number of requests."""
        return True

    def start_step(self, sequences: int) -> None:
        """Begin to plan a step. sequences: number of running sequences."""

    def up_to(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request may be computed in this step. The first request in
        order must make progress."""
        return count

    def drafts(self, request: Request, count: int, capacity: int) -> list[int]:
        """Return up to `capacity` drafts for a step that computes `count` tokens of a request. Its blocks have room for
        them afterwards."""
        return []

    def planned(self, plan: StepPlanBuilder, step: int) -> None:
        """A step has been decided, and its plan is about to be made."""

    def step_ended(self, plan: StepPlan) -> None:
        """A step has ended, and is about to be recorded."""

    def verified(self, request: Request, accepted: int, proposed: Sequence[int]) -> int:
        """Record the outcome of a request's drafts. Returns how many of its computed tokens were rejected ones.

        accepted: number of accepted drafts. proposed: tokens that a drafter with weights proposes after the newest one.
        """
        return 0

    def guess(self, request: Request) -> list[int]:
        """Return drafts that may follow the newest token of a request, ignoring its constraint."""
        return []

    # -- what it tells -------------------------------------------------------------------------------------

    def load(self, requests: Iterable[Request]) -> dict[str, Any]:
        """Return fields of EngineLoad. requests: all that run or wait in the queue."""
        return {}

    def report(self) -> PartRecord | None:
        """Return its figures for EngineStats."""
        return None

    def audit(self, running: Sequence[Request]) -> None:
        """Raise AssertionError if its books do not balance."""


HOOKS = tuple(name for name, value in vars(Part).items() if callable(value) and name != "attach")
"""The methods that a scheduler calls."""


class Parts(ByClass[Part]):
    """The parts of one scheduler, and for each method of Part those of them that override it, bound."""

    def __init__(self, parts: Sequence[Part] = ()):
        super().__init__(parts)
        self.check = overriding(parts, Part.check)
        self.opened = overriding(parts, Part.opened)
        self.may_start = overriding(parts, Part.may_start)
        self.shorten = overriding(parts, Part.shorten)
        self.offer = overriding(parts, Part.offer)
        self.may_receive = overriding(parts, Part.may_receive)
        self.keeps = overriding(parts, Part.keeps)
        self.progressed = overriding(parts, Part.progressed)
        self.let_go = overriding(parts, Part.let_go)
        self.cancelled = overriding(parts, Part.cancelled)
        self.reserved = overriding(parts, Part.reserved)
        self.passed = overriding(parts, Part.passed)
        self.started = overriding(parts, Part.started)
        self.stopped = overriding(parts, Part.stopped)
        self.invalidated = overriding(parts, Part.invalidated)
        self.ending = overriding(parts, Part.ending)
        self.update = overriding(parts, Part.update)
        self.cleared = overriding(parts, Part.cleared)
        self.may_plan = overriding(parts, Part.may_plan)
        self.start_step = overriding(parts, Part.start_step)
        self.up_to = overriding(parts, Part.up_to)
        self.drafts = overriding(parts, Part.drafts)
        self.planned = overriding(parts, Part.planned)
        self.step_ended = overriding(parts, Part.step_ended)
        self.verified = overriding(parts, Part.verified)
        self.guess = overriding(parts, Part.guess)
        self.load = overriding(parts, Part.load)
        self.report = overriding(parts, Part.report)
        self.audit = overriding(parts, Part.audit)

    @property
    def asked(self) -> list[type[PartRecord]]:
        """The records of requests that parts read."""
        return [part.asks for part in self.all if part.asks is not None]

    def generates(self, asked: Asking) -> bool:
        """Return whether a request is answered by tokens, and not by a part."""
        return not any(part.answers and part.asks and part.asks.part in asked.needs for part in self.all)

    def kept(self, *states: State) -> list[Request]:
        """Return the requests that parts keep outside the queue, as Part.keeps says: those in these states, or all."""
        return [each for keeps in self.keeps for each in keeps() if not states or each.state in states]

    def takes(self, field: str) -> bool:
        """Return whether a part understands this field of a request."""
        return any(part.field == field for part in self.all)
