"""Makes a scheduler decide again what it decided when its tape was recorded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from cluster.lab.tape.replay_limits import watched
from engine.core.door.inputs import Input
from engine.core.door.journal import Journal
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.costs.step_cost import StepTimes, StepWork
from engine.parts.kv_fetching.kv_fetching import split_names
from engine.parts.snapshot_kinds import ORDINARY
from engine.parts.tape.answers import NAMES, Answers, EndOfAnswers
from engine.parts.tape.digest import UNFINISHED, digest
from engine.parts.tape.engine_tape import (
    AT,
    COMMIT,
    COMMITTED,
    DETAIL,
    HASHES,
    HEAD,
    PLAN,
    PLANNED,
    REQUEST,
    EngineTape,
    Segment,
)
from engine.parts.tape.inputs import CommitDetails, Detail, Ended, Shape, decoder, stop_token
from engine.parts.tape.object_graph import UnknownState
from engine.parts.tape.snapshot import dump, load
from engine.wire.plan import StepPlan, StepResult
from engine.wire.token_delta import FinishReason

KEYFRAME = 2000  # moments, at least, between two kept states, from which an earlier moment is reached
KEPT_BYTES = 2**28  # of these states together, about
LATEST_S = 2e11  # since 1970: the year 8307

DETAILS: msgspec.msgpack.Decoder[Detail] = msgspec.msgpack.Decoder(Detail)


@dataclass(slots=True)
class Moment:
    """One call of the scheduler."""

    segment: int
    at: float = 0.0
    """On the engine's clock."""
    input: Input | None = None
    """None for the two calls of a step."""
    digest: int | None = None
    """Of the plan, if this call planned a step."""
    step_s: float = 0.0
    """Seconds of the step, if this call recorded one."""
    details: CommitDetails = field(default_factory=CommitDetails)
    ended: list[Ended] = field(default_factory=list)

    @property
    def commits(self) -> bool:
        return self.input is None and self.digest is None


class Diverged(Exception):
    """A decision is not the one that was recorded."""

    def __init__(self, index: int, moment: Moment, why: str):
        super().__init__(index, moment, why)
        self.index, self.moment, self.why = index, moment, why

    def __str__(self) -> str:
        return self.why


class Failed(Diverged):
    """The scheduler fails, at the moment at which it failed when the tape was recorded."""


@dataclass(frozen=True, slots=True)
class Keyframe:
    state: bytes
    answers: int


class EndsJournal(Journal):
    """Notes which requests end."""

    def __init__(self, ends: list[tuple[Request, str]]):
        self._ends = ends

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._ends.append((request, reason))


class Replay:
    """A scheduler that is somewhere on a tape. `position` is the number of moments that have been replayed.

    The first segment's state is the start; later segments' states are not needed to go on, only to get there quickly.
    """

    def __init__(self, tape: EngineTape):
        """Raises UnknownState."""
        self.tape = tape
        if not tape.segments:
            raise UnknownState("it has no segments")
        check_time(tape.wall_s + tape.segments[0].started_at)
        self.moments: list[Moment] = []
        self._hashes: dict[int, list[bytes]] = {}  # of each request's blocks, by its number of arrival
        self._names: dict[tuple[int, bytes], bytes] = {}  # of blocks in tiers, as in Answers
        self._first: list[int] = []  # moment of each segment
        try:
            for number, segment in enumerate(tape.segments):
                self._first.append(len(self.moments))
                self.moments += self._read(number, segment)
        except UnknownState:
            raise
        except Exception as error:
            raise UnknownState(f"its entries are damaged: {type(error).__name__}: {error}") from error
        self._times_of_moments = [moment.at for moment in self.moments]
        largest = max((len(segment.state) for segment in tape.segments), default=0)
        self._period = max(KEYFRAME, len(self.moments) * largest // KEPT_BYTES)
        self._keyframes: dict[int, Keyframe] = {
            first: Keyframe(segment.state, 0) for first, segment in zip(self._first, tape.segments, strict=True)
        }
        self.scheduler: Scheduler
        self.times: StepTimes
        self.plan: StepPlan | None = None  # the newest
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None
        """Called with each step that is committed, and its seconds."""
        self.on_end: Callable[[Request, str], None] = lambda request, reason: None
        self._ends: list[tuple[Request, str]] = []
        self._load(0)

    @property
    def now(self) -> float:
        """Time of the newest moment, on the engine's clock."""
        return self.moments[self.position - 1].at if self.position else self.tape.segments[0].started_at

    @property
    def num_plans(self) -> int:
        return sum(moment.digest is not None for moment in self.moments)

    def place_of(self, at: float) -> int:
        """Return the position after all moments up to this time."""
        return bisect_right(self._times_of_moments, at)

    def go_to(self, position: int) -> None:
        """Move to a position, forwards or backwards. Raises Diverged."""
        position = max(0, min(position, len(self.moments)))
        near = max(first for first in self._keyframes if first <= position)
        if position < self.position or near > self.position:
            self._load(near)
        while self.position < position:
            self.step()

    def run(self) -> Iterator[Moment]:
        """Replay the rest. Yields each moment once it has been replayed. Raises Diverged."""
        while self.position < len(self.moments):
            yield self.step()

    def step(self) -> Moment:
        """Replay the next moment. Raises Diverged if the scheduler does anything else than it did."""
        moment, why = self.moments[self.position], ""
        try:
            with watched(moment):
                why = self._redo(moment)
        except EndOfAnswers as error:
            why = str(error)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            last = self.position == len(self.moments) - 1
            raise (Failed if last and self.tape.cause == "failed" else Diverged)(self.position, moment, told) from error
        if why:
            raise Diverged(self.position, moment, why)
        for request, reason in self._ends:
            self.on_end(request, reason)
        self.position += 1
        return moment

    def _redo(self, moment: Moment) -> str:
        """Make the call of a moment. Returns what differs, if anything."""
        if self.position and moment.segment != self.moments[self.position - 1].segment:
            self._answers.go_on(bytes(self.tape.segments[moment.segment].answers))
        if self.position % self._period == 0 and self.position not in self._keyframes:
            self._keyframes[self.position] = Keyframe(dump(self.scheduler, self.times), self._answers.position)
        self._ends.clear()
        if why := self._apply(moment):
            return why
        if (found := [(r.order[1], reason) for r, reason in self._ends]) != [
            (ended.order, ended.reason) for ended in moment.ended
        ]:
            then = ", ".join(f"{ended.request_id} ({ended.reason})" for ended in moment.ended) or "none"
            now = ", ".join(f"{r.request_id} ({reason})" for r, reason in self._ends) or "none"
            return f"requests that ended then: {then}; now: {now} {found}"
        self.scheduler.out.clear()
        return ""

    def _apply(self, moment: Moment) -> str:
        scheduler = self.scheduler
        if moment.input is not None:
            given = moment.input
            scheduler.apply(given.live(scheduler, self._answers) if isinstance(given, Shape) else given, moment.at)
            self._give_hashes()
        elif moment.digest is not None:
            plan = scheduler.schedule(moment.at)
            self.plan = plan or self.plan
            if moment.digest == UNFINISHED:
                return "this call did not return when the tape was recorded"
            if digest(plan) != moment.digest:
                return "the plan is another one"
        elif not scheduler.planned:
            return "no step was planned that could end"
        else:
            self._commit(moment)
        return ""

    def _commit(self, moment: Moment) -> None:
        plan, _ = self.scheduler.planned[0]
        details = moment.details
        tokens = [[ORDINARY] * count for count in details.counts or map(int, plan.samples)]
        for ended in moment.ended:
            if ended.reason == "stop" and ended.kept and ended.kept <= len(tokens[ended.row]):
                tokens[ended.row][ended.kept - 1] = stop_token(self.scheduler.limits.vocab_size)
            elif ended.token:
                tokens[ended.row] = [ended.token]
        for row, token in details.errors.items():
            tokens[row] = [token]
        nothing = [None] * len(tokens)
        answers = {row: b"finite" if finite else b"" for row, finite in details.pooled.items()}
        result = StepResult(plan.step, tokens, [*nothing], [*nothing], answers=answers, drafts=details.proposed)
        self.times.observe_step(StepWork.of(plan), moment.step_s, details.draft_s)
        self.scheduler.commit(result, moment.at, moment.step_s)
        self.on_step(plan, moment.step_s)

    # -- states --------------------------------------------------------------------------------------------

    def _load(self, position: int) -> None:
        keyframe = self._keyframes[position]
        segment = self.moments[position].segment if position < len(self.moments) else len(self._first) - 1
        self.position = position
        self._answers = Answers(bytes(self.tape.segments[segment].answers), keyframe.answers, self._hashes, self._names)
        try:
            with watched(keyframe):
                self._use(*load(keyframe.state, self._answers))
        except UnknownState:
            raise
        except Exception as error:
            raise UnknownState(f"it is no scheduler: {type(error).__name__}: {error}") from error

    def _use(self, scheduler: Scheduler, times: StepTimes) -> None:
        self.scheduler, self.times = scheduler, times
        self.plan = scheduler.planned[-1][0] if scheduler.planned else None
        self._known: set[int] = set()
        self._give_hashes()
        scheduler.journal = EndsJournal(self._ends)

    def _give_hashes(self) -> None:
        """Give new requests the hashes that their blocks had."""
        scheduler = self.scheduler
        for request in [*scheduler.queue.live.values(), *scheduler.parts.kept()]:
            if (order := request.order[1]) not in self._known:
                self._known.add(order)
                request.prefix.hashes = list(self._hashes.get(order, ()))

    # -- reading -------------------------------------------------------------------------------------------

    def _read(self, number: int, segment: Segment) -> Iterator[Moment]:
        entries, place, decode = bytes(segment.entries), 0, decoder().decode
        current: Moment | None = None
        while place < len(entries):
            kind, ready = entries[place], None
            if kind == PLANNED:
                _, at, told = PLAN.unpack_from(entries, place)
                ready = Moment(number, at, digest=told)
                place += PLAN.size
            elif kind == COMMITTED:
                _, at, step_s = COMMIT.unpack_from(entries, place)
                ready = Moment(number, at, step_s=step_s)
                place += COMMIT.size
            else:
                size, start = HEAD.unpack_from(entries, place)[1], place + HEAD.size
                place = start + size
                if kind == HASHES:
                    (order,) = REQUEST.unpack_from(entries, start)
                    hashes = split_names(entries[start + REQUEST.size : place])
                    if order <= NAMES:
                        self._names[order, hashes[0]] = hashes[1]
                    else:
                        self._hashes[order] = hashes
                    continue
                if kind == DETAIL:
                    assert current is not None
                    detail = DETAILS.decode(entries[start:place])
                    if isinstance(detail, Ended):
                        current.ended.append(detail)
                    else:
                        current.details = detail
                    continue
                (at,) = AT.unpack_from(entries, start)
                ready = Moment(number, at, decode(entries[start + AT.size : place]))
            if ready is not None:
                check_time(self.tape.wall_s + ready.at)
                if current is not None:
                    yield current
                current = ready
        if current is not None:
            yield current


def check_time(at: float) -> None:
    """Raise UnknownState unless a time, in seconds since 1970, can be shown."""
    if not 0 <= at < LATEST_S:
        raise UnknownState(f"{at} s since 1970 is no time")
