"""Records what enters a scheduler, while it runs."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from engine.clock import Clock
from engine.core.costs.step_cost import StepTimes, StepWork
from engine.core.features.holds.holds import Holds
from engine.core.features.images.image_handoffs import ImageHandoffs, number_of
from engine.core.features.kv_fetching import KVFetching, split_names
from engine.core.features.kv_offloading import KVOffloading
from engine.core.features.speculator import NoSpeculation, unwatched
from engine.core.output import Event
from engine.core.request import Request, State
from engine.core.scheduler import Scheduler
from engine.core.tape.answers import NO_TOKEN, ORDINARY, DrafterWatch, TapedGrammar, TapedLinks, TapedNames
from engine.core.tape.digest import NOTHING, UNFINISHED, WHOLE, digest, digest_of_last
from engine.core.tape.inputs import (
    Aborted,
    AdapterNumbered,
    AdapterRead,
    Added,
    AddedRemote,
    CacheCleared,
    Call,
    CommitDetails,
    EncodersSet,
    Ended,
    FetchesUpdated,
    GrammarSet,
    HoldsGiven,
    HoldsReleased,
    ImageEnded,
    MovesAsked,
    Record,
    ReplicasSet,
    RoleSet,
    StoreListed,
    StuckAsked,
    TiersAnswered,
    handoff_input,
    lora_without_path,
    stop_token,
)
from engine.core.tape.kept_tapes import KeptTapes
from engine.core.tape.ring import (
    COMMANDS,
    COMMIT,
    COMMITTED,
    PLAN,
    PLANNED,
    TAKE,
    Cause,
    EngineTape,
    Ring,
    Segment,
    hashes_entry,
    record_entry,
)
from engine.core.tape.shared_copy import NoCopy, open_copy
from engine.core.tape.snapshot import dump
from engine.errors import EngineUnavailable, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import BlocksAsked, Failed, HandoffEvent, Received
from engine.wire.kv_offload import StoreListing, TierAnswer, TierCommand
from engine.wire.lora import LoRARequest
from engine.wire.plan import ON_DEVICE, BlockChange, StepPlan, StepResult
from engine.wire.remote_request import RemoteRequest
from engine.wire.token_delta import FinishReason

logger = logging.getLogger(__name__)

SETTLED = 16  # entries to encode at a time: some eight steps


class NoTape:
    """Records nothing."""

    def take(self) -> bytes:
        return b""

    def settle(self) -> None:
        pass

    def keep(self, error: Exception) -> None:
        pass

    def close(self) -> None:
        pass


class Tape:
    """Records the calls of a scheduler in a ring, so that Replay can make them again.

    It puts its own methods in front of the scheduler's methods that change anything (`_attach`), on this one object.
    Calls that the scheduler makes of its own parts are not recorded. The two calls of a step take 30 bytes. They only
    keep plan and result, which nobody changes any more; `settle` encodes them.
    """

    period_s = 1.0
    """Between two updates of the copy."""

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes,
        *,
        engine_id: str,
        role: str,
        max_bytes: int,
        clock: Clock,
        kept: KeptTapes,
        shared_root: Path | None = None,
    ):
        """kept: where the tape is written if the step loop fails. shared_root: folder in shared memory for a copy,
        which is left if the process is killed."""
        self._scheduler, self._times, self._engine_id, self._clock, self._kept = (
            scheduler, times, engine_id, clock, kept
        )  # fmt: skip
        self._head = EngineTape(
            engine_id=engine_id,
            version=code_version(),  # it reads files
            wall_s=clock.wall() - clock.monotonic(),
            role=role,
            segments=[],
        )
        self._ring = Ring(max_bytes, scheduler.limits.vocab_size)
        self._copy = NoCopy() if shared_root is None else open_copy(self._head, shared_root, kept)
        self._vocab_size, self._live = scheduler.limits.vocab_size, scheduler.queue.live
        self._num_others = 0  # lists of hashes that are not those of a request's blocks
        self._names: TapedNames | None = None  # of blocks in tiers
        self._with_links: list[Any] = []  # parts that ask for quarantined engines
        self._busy = False  # whether a call is under way, so that further ones come from the scheduler itself
        self._spent = 0.0, 0.0  # seconds of the step whose commit follows, and of its drafter
        self._ended: list[tuple[Request, FinishReason]] = []  # by the call that is under way
        self._covered: list[tuple[object, str]] = []
        #: Whether steps can yield more than one token for each sequence, or tokens for other engines.
        self._has_details = not isinstance(scheduler.speculation, NoSpeculation)
        self._attach()
        self._begin()

    def take(self) -> bytes:
        """Return the tape: an EngineTape in msgpack. Its hashes have no key yet (tape_with_key). Empty if the
        scheduler's state could not be written."""
        return msgspec.msgpack.encode(self._tape()) if self._ring.segments else b""

    def settle(self) -> None:
        """Encode the newest steps, once there are some. Called while a step computes, when the loop has time."""
        if len(self._ring.pending) + len(self._ring.pending_answers) >= SETTLED:
            self._ring.settle()

    def keep(self, error: Exception) -> None:
        """Write the tape to a file, because the step loop has failed. Does nothing if another rank is gone, since the
        scheduler has nothing to do with it; the replica keeps the copy then."""
        if isinstance(error, EngineUnavailable) or not self._ring.segments:
            return
        try:
            path = self._kept.keep(self._tape("failed", f"{type(error).__name__}: {error}"))
        except Exception:
            logger.exception("the tape of engine %s cannot be kept", self._engine_id)
        else:
            logger.error("engine %s failed; `manta replay %s` shows its last steps", self._engine_id, path)
            self._copy.close()

    def close(self) -> None:
        """Remove the copy in shared memory, because the engine ends as it should."""
        self._copy.close()

    def _tape(self, cause: Cause = "asked", reason: str = "") -> EngineTape:
        self._ring.settle()
        *closed, newest = self._ring.segments
        # blocks of these requests may be matched, and no entry tells their hashes yet
        told = b"".join(hashes_entry(request.order[1], request.prefix.hashes) for request in {*self._unfinished()})
        newest = Segment(newest.started_at, newest.state, bytes(newest.entries) + told, bytes(newest.answers))
        return msgspec.structs.replace(
            self._head,
            wall_s=self._clock.wall() - self._clock.monotonic(),
            segments=[*closed, newest],
            cause=cause,
            reason=reason,
        )

    def _unfinished(self) -> Iterator[Request]:
        yield from self._live.values()
        yield from self._scheduler.handoffs.receiving.values()

    def _look(self) -> None:
        """Update the copy, and begin another segment if the newest is long enough."""
        self._ring.settle()
        if self._copy.is_open:
            self._copy.update(self._ring.entries, self._ring.answers, self._unfinished())
        if self._ring.is_due:
            self._begin()

    def _begin(self) -> None:
        """Begin a segment. If that fails, nothing is recorded from now on."""
        try:
            state = dump(self._scheduler, self._times)
        except Exception:
            logger.exception("the tape of engine %s ends: the scheduler's state cannot be written", self._engine_id)
            return self._end()
        if len(state) > max(self._ring.max_bytes, 2**20):  # the least engine.tape_mib; tests have smaller rings
            logger.warning(
                "the tape of engine %s ends: the scheduler's state takes %.1f MiB, more than engine.tape_mib",
                self._engine_id,
                len(state) / 2**20,
            )
            return self._end()
        now = self._clock.monotonic()
        self._ring.begin(state, now)
        if self._names is not None:
            self._names.told.clear()
        self._copy.begin(state, now, len(self._ring.segments))

    def _end(self) -> None:
        """Record nothing from now on, and drop what has been recorded. What live requests have been given records until
        they end."""
        for part, name in self._covered:
            delattr(part, name)
        self._covered.clear()
        if self._names is not None:
            self._scheduler.offloading.set_names(self._names.name_of)
        self._scheduler.speculation.watch = unwatched
        for part in self._with_links:
            part.quarantined = part.quarantined.quarantined
        self._ring.end()
        self._copy.close()

    # -- steps ---------------------------------------------------------------------------------------------

    def _cover_steps(self) -> None:
        """Put functions in front of the two calls of a step. They have all that they need in their closures, since a
        step has just used the CPU's caches for other things, so that each attribute of the tape would cost a miss."""
        scheduler, ring, ended, detailed = self._scheduler, self._ring, self._ended, self._detailed
        plan_step, end_step, planned = scheduler.schedule, scheduler.commit, scheduler.planned
        later = ring.pending.append
        #: Live holds: an idle engine ends them too, and moves them to its tiers.
        held = scheduler.holds.table.by_end if isinstance(scheduler.holds, Holds) else {}
        has_tiers, look_at, whole = self._names is not None, -math.inf, WHOLE - 1

        def schedule(now: float) -> StepPlan | None:
            nonlocal look_at
            works = True if held else has_tiers
            try:
                plan = plan_step(now)
            except BaseException:
                later(PLAN.pack(PLANNED, now, UNFINISHED))
                raise
            if plan is None:
                if works or planned or scheduler.has_work:  # else the engine is idle
                    later((PLAN.pack, PLANNED, now, NOTHING))
                if not planned:  # nobody calls `settle` before the next step
                    ring.settle()
            elif plan.added or plan.drafts or not plan.step & whole:
                later((planned_entry, now, plan))
            else:  # keep no more of the plan than its digest needs
                starts = plan.starts
                later((goes_on_entry, now, len(starts), starts[-1], plan.counts[-1], plan.blocks))
            if now >= look_at:
                look_at = now + self.period_s
                self._look()
            return plan

        def commit(result: StepResult, now: float) -> list[Event]:
            step = planned[0]
            try:
                events = end_step(result, now)
            finally:
                if self._has_details or result.pooled:
                    later((detailed, step, result, now, self._spent))
                else:
                    later((COMMIT.pack, COMMITTED, now, self._spent[0]))
            if ended:
                self._tell_ended(step[1], result, events)
            return events

        scheduler.schedule, scheduler.commit = schedule, commit  # type: ignore[method-assign]
        self._covered += [(scheduler, "schedule"), (scheduler, "commit")]

    def _detailed(
        self, step: tuple[StepPlan, list[Request]], result: StepResult, now: float, spent: tuple[float, float]
    ) -> bytes:
        """Return the entries of a committed step that has details."""
        plan, requests = step
        counts = bytes(map(len, result.tokens)) if plan.drafts or result.pooled else b""
        mine = [i for i, request in enumerate(requests) if request.asked_by and result.tokens[i]]
        details = CommitDetails(
            draft_s=spent[1],
            counts=counts,
            errors={i: result.tokens[i][0] for i in mine if result.tokens[i][0] < 0},
            pooled={i: bool(pooled) for i, pooled in result.pooled.items()},
            proposed={i: [self._kind(token) for token in tokens] for i, tokens in result.drafts.items()},
        )
        return COMMIT.pack(COMMITTED, now, spent[0]) + record_entry(details)

    def _kind(self, token: int) -> int:
        return token if token == ON_DEVICE else ORDINARY if 0 <= token < self._vocab_size else NO_TOKEN

    def _tell_ended(self, requests: list[Request], result: StepResult, events: list[Event]) -> None:
        kept = {event.request: len(event.delta.token_ids) for event in events}
        for request, reason in self._ended:
            row = requests.index(request)
            token = min(0, *result.tokens[row][:1], 0)
            self._tell_end(request, reason, row, kept.get(request, 0), token)
        self._ended.clear()

    def _tell_end(self, request: Request, reason: FinishReason, row: int = -1, kept: int = 0, token: int = 0) -> None:
        order = request.order[1]
        self._ring.hashes(order, request.prefix.hashes)
        self._ring.record(Ended(order, request.request_id, reason, request.num_output, row, kept, token))

    def _observe_step(self, observe: Callable[..., None], work: StepWork, seconds: float, draft_s: float = 0.0) -> None:
        self._spent = seconds, draft_s
        observe(work, seconds, draft_s)

    def _observe_finished(
        self, observe: Callable[..., None], request: Request, reason: FinishReason, now: float
    ) -> None:
        self._ended.append((request, reason))
        observe(request, reason, now)

    # -- other calls ---------------------------------------------------------------------------------------

    def _attach(self) -> None:
        scheduler = self._scheduler
        of_scheduler: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "add_remote": self._add_remote,
            "set_grammar": self._set_grammar,
            "abort": self._abort,
            "handle": self._handle,
        }
        self._cover(scheduler, of_scheduler)
        self._cover(scheduler.handoffs, {"stuck": self._stuck})
        self._cover(scheduler.adapters, {"new_load": self._new_load})
        for record in (MovesAsked, CacheCleared, ReplicasSet, RoleSet, HoldsReleased, HoldsGiven, AdapterRead):
            self._cover_call(record)
        self._cover(scheduler.metrics, {"observe_finished": self._observe_finished})
        fetching = scheduler.fetching
        if isinstance(offloading := scheduler.offloading, KVOffloading):
            self._names = TapedNames(offloading.name_of, self._ring)
            offloading.set_names(self._names)
            self._cover(offloading, {"take_commands": self._take_commands})
            self._cover(scheduler.loading, {"answered": self._answered})
        if (
            self._has_details
            or isinstance(offloading, KVOffloading)
            or isinstance(fetching, KVFetching)
            or scheduler.handoffs.policy is not None
        ):  # else no decision depends on them
            self._cover(self._times, {"observe_step": self._observe_step})
        if isinstance(images := scheduler.images.handoffs, ImageHandoffs):
            self._cover_call(EncodersSet)
            self._cover(images.channel, {"events": self._image_events})
            self._with_links.append(images)
        scheduler.speculation.watch = DrafterWatch(self._ring)
        if (policy := scheduler.handoffs.policy) is not None:
            self._with_links.append(policy)
        if isinstance(fetching, KVFetching):
            self._cover(fetching, {"update": self._update_fetches})
            self._with_links.append(fetching)
        for part in self._with_links:
            part.quarantined = TapedLinks(part.quarantined, self._ring)
        self._cover_steps()

    def _cover(self, part: object, methods: dict[str, Callable[..., Any]]) -> None:
        """Put these methods in front of those of an object, which they get as their first argument."""
        for name, method in methods.items():
            setattr(part, name, partial(method, getattr(part, name)))
            self._covered.append((part, name))

    def _cover_call(self, record: type[Call]) -> None:
        """Record the calls of a method whose arguments may all be on the tape."""
        path, _, name = f"_scheduler.{record.method}".rpartition(".")
        self._cover(attrgetter(path)(self), {name: partial(self._record, record)})

    def _record(self, record: type[Call], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._call(record(*args, **options), call, *args, **options)  # type: ignore[arg-type]

    def _call(self, record: Record | None, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call, and record it if it comes from outside and succeeds. An error changes nothing in a scheduler."""
        if self._busy:
            return call(*args, **options)
        self._busy = True
        try:
            result = call(*args, **options)
        except ServingError:
            self._ended.clear()
            raise
        finally:
            self._busy = False
        if record is not None:
            self._ring.record(record)
        for request, reason in self._ended:
            self._tell_end(request, reason)
        self._ended.clear()
        return result

    def _add(self, add: Callable[..., Request], message: GenerateRequest, now: float) -> Request:
        order = self._hashes_of([image.mm_hash for image in message.mm_features])
        found: Request = self._call(Added.of(message, now, self._vocab_size, order), add, message, now)
        return found

    def _add_remote(self, add: Callable[..., Request], asked_by: RemoteRequest, now: float) -> Request:
        self._has_details = True
        order = self._hashes_of([image.mm_hash for image in asked_by.mm_features])
        found: Request = self._call(AddedRemote.of(asked_by, now, self._vocab_size, order), add, asked_by, now)
        return found

    def _hashes_of(self, hashes: list[bytes]) -> int:
        """Record hashes that belong to the next record. Returns the number under which they are on the tape."""
        if hashes:
            self._num_others += 1
            self._ring.hashes(-self._num_others, hashes)
        return -self._num_others

    def _set_grammar(self, call: Callable[..., None], request: Request, grammar: Any) -> None:
        self._call(GrammarSet(request.request_id), call, request, TapedGrammar(grammar, self._ring))

    def _abort(
        self,
        abort: Callable[..., Event | None],
        request_id: str,
        now: float,
        error: ServingError | None = None,
        *,
        reason: FinishReason = "abort",
    ) -> Event | None:
        record = Aborted(now, request_id, reason, error is not None) if request_id in self._live else None
        event: Event | None = self._call(record, abort, request_id, now, error, reason=reason)
        return event

    def _handle(self, handle: Callable[..., list[Event]], event: HandoffEvent, now: float) -> list[Event]:
        handoffs = self._scheduler.handoffs
        received = event.handoff_id if isinstance(event, Received) else getattr(event, "handoff_id", "")
        request = handoffs.receiving.get(received)
        had_ended = request is not None and request.state is State.FINISHED
        events = handle(event, now)
        token = event.first.token if isinstance(event, Received) and event.first.token < 0 else ORDINARY
        if any(reason == "stop" for _, reason in self._ended):
            token = stop_token(self._vocab_size)
        order = self._hashes_of(split_names(b"".join(event.names)) if isinstance(event, BlocksAsked) else [])
        if (record := handoff_input(event, token, now, order)) is not None:
            self._ring.record(record)  # type: ignore[arg-type]
        for ended, reason in self._ended:
            self._tell_end(ended, reason)
        self._ended.clear()
        if request is not None and had_ended:  # its blocks have been cached since
            self._ring.hashes(request.order[1], request.prefix.hashes)
        return events

    def _image_events(self, events: Callable[[], list[HandoffEvent]]) -> list[HandoffEvent]:
        found = events()
        for event in found:
            if isinstance(event, Received | Failed):
                failed = event.reason if isinstance(event, Failed) else None
                self._ring.record(ImageEnded(number_of(event.handoff_id), failed))
        return found

    def _answered(
        self, answered: Callable[..., None], answers: Iterable[TierAnswer | StoreListing], now: float
    ) -> None:
        found = list(answers)
        for listing in [one for one in found if isinstance(one, StoreListing)]:  # these come first
            self._ring.record(StoreListed.of(listing, now, self._hashes_of(StoreListed.names_of(listing))))
        of_ranks = [one for one in found if isinstance(one, TierAnswer)]
        if of_ranks or self._scheduler.offloading.loaded:
            self._ring.record(TiersAnswered(of_ranks, now))
        answered(found, now)

    def _take_commands(self, take: Callable[..., list[TierCommand]], now: float) -> list[TierCommand]:
        self._ring.pending.append(TAKE.pack(COMMANDS, now))
        return take(now)

    def _update_fetches(self, update: Callable[..., None], now: float) -> None:
        if self._scheduler.fetching.brought:
            self._ring.record(FetchesUpdated(now))
        update(now)

    def _stuck(self, call: Callable[..., list[Request]], queue: Any, now: float) -> list[Request]:
        # without other engines' prompts, it decides nothing
        record = StuckAsked(now) if self._scheduler.handoffs.role else None
        found: list[Request] = self._call(record, call, queue, now)
        return found

    def _new_load(self, call: Callable[..., int], lora: LoRARequest) -> int:
        without = lora_without_path(lora)
        assert without is not None
        number: int = self._call(AdapterNumbered(without), call, lora)
        return number


def planned_entry(now: float, plan: StepPlan) -> bytes:
    return PLAN.pack(PLANNED, now, digest(plan))


def goes_on_entry(now: float, num_rows: int, start: int, count: int, blocks: list[BlockChange]) -> bytes:
    """Return the entry of a step that only goes on. The arguments are those of digest_of_last."""
    return PLAN.pack(PLANNED, now, digest_of_last(num_rows, start, count, blocks))


@cache
def code_version() -> str:
    """Return the versions of Manta and Python, and a digest of the source on which a scheduler's decisions depend."""
    engine, digest = Path(__file__).parents[2], hashlib.blake2b(digest_size=8)
    for folder in ("core", "wire", "spec_decode"):
        for file in sorted((engine / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    try:
        manta = version("manta-serve")
    except PackageNotFoundError:
        manta = "unknown"
    return f"manta {manta}, python {sys.version_info.major}.{sys.version_info.minor}, code {digest.hexdigest()}"
