"""Records what enters a scheduler, while it runs."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from engine.clock import Clock
from engine.core.door.inputs import Aborted, Added, Input
from engine.core.door.journal import NOBODY_LISTENS, Journal
from engine.core.output import Event
from engine.core.request import Request, State
from engine.core.scheduler import Scheduler
from engine.costs.step_cost import StepTimes
from engine.errors import EngineUnavailable
from engine.parts.grammar.grammars import Grammars
from engine.parts.grammar.inputs import GrammarSet
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import AddedRemote, HandoffWentOn
from engine.parts.images.image_handoffs import number_of
from engine.parts.images.inputs import ImageWentOn
from engine.parts.input_with_text import InputWithText
from engine.parts.kv_fetching.kv_fetching import split_names
from engine.parts.kv_tiers.inputs import TiersAnswered
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.snapshot_kinds import NO_TOKEN, ORDINARY
from engine.parts.speculation.speculator import Speculator, unwatched
from engine.parts.tape.answers import DrafterWatch, TapedGrammar, TapedNames
from engine.parts.tape.digest import NOTHING, UNFINISHED, WHOLE, digest, digest_of_last
from engine.parts.tape.engine_tape import COMMIT, COMMITTED, PLAN, PLANNED, Cause, EngineTape, Segment
from engine.parts.tape.inputs import (
    AbortedShape,
    AddedRemoteShape,
    AddedShape,
    CommitDetails,
    Ended,
    GrammarShape,
    ImageShape,
    StoreShape,
    TiersAnsweredShape,
    handoff_shape,
    kind_of,
    stop_token,
)
from engine.parts.tape.kept_tapes import KeptTapes
from engine.parts.tape.ring import Ring, detail_entry, hashes_entry
from engine.parts.tape.shared_copy import NoCopy, open_copy
from engine.parts.tape.snapshot import KINDS, dump
from engine.wire.handoff import BlocksAsked, Failed, HandoffEvent, Received
from engine.wire.parts.images import images_in
from engine.wire.parts.kv_offload import StoreListing, TierAnswer
from engine.wire.plan import ON_DEVICE, BlockChange, StepPlan, StepResult
from engine.wire.token_delta import FinishReason

logger = logging.getLogger(__name__)

SETTLED = 16  # entries to encode at a time: some eight steps


class Tape(Journal):
    """Records what a scheduler is given in a ring, so that Replay can give it again.

    The two halves of a step take 30 bytes. They only keep plan and result, which nobody changes any more; `settle`
    encodes them. What parts ask of the outside is answered through Taped... (answers.py).
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
        self._ended: list[tuple[Request, FinishReason]] = []  # by the input or step that is under way
        self._arriving: Request | None = None  # its KV comes by the input that is under way, but it has ended
        self._look_at = -math.inf
        #: Whether steps can yield more than one token for each sequence, or tokens for other engines.
        self._has_details = (speculator := scheduler.parts.get(Speculator)) is not None
        if (offloading := scheduler.parts.get(KVOffloading)) is not None:
            self._names = TapedNames(offloading.name_of, self._ring)
            offloading.set_names(self._names)
        if speculator is not None:
            speculator.watch = DrafterWatch(self._ring)
        if (grammars := scheduler.parts.get(Grammars)) is not None:
            grammars.watch = partial(TapedGrammar, log=self._ring)
        scheduler.journal = self
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
        yield from self._scheduler.parts.kept()

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
        self._scheduler.journal = NOBODY_LISTENS
        if self._names is not None:
            self._scheduler.parts[KVOffloading].set_names(self._names.name_of)
        if (speculator := self._scheduler.parts.get(Speculator)) is not None:
            speculator.watch = unwatched
        if (grammars := self._scheduler.parts.get(Grammars)) is not None:
            grammars.watch = None
        self._ring.end()
        self._copy.close()

    # -- steps ---------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan | None, now: float) -> None:
        later = self._ring.pending.append
        if plan is None:
            later((PLAN.pack, PLANNED, now, NOTHING))
            if not self._scheduler.planned:  # nobody calls `settle` before the next step
                self._ring.settle()
        elif plan.added or plan.drafts or not plan.step & (WHOLE - 1):
            later((planned_entry, now, plan))
        else:  # keep no more of the plan than its digest needs
            starts = plan.starts
            later((goes_on_entry, now, len(starts), starts[-1], plan.counts[-1], plan.blocks))
        self._tell_ends()
        if now >= self._look_at:
            self._look_at = now + self.period_s
            self._look()

    def failed(self, now: float) -> None:
        self._ring.pending.append(PLAN.pack(PLANNED, now, UNFINISHED))
        self._tell_ends()

    def committed(
        self,
        step: tuple[StepPlan, list[Request]],
        result: StepResult,
        now: float,
        step_s: float,
        events: list[Event],
    ) -> None:
        if self._has_details or result.answers:
            self._ring.pending.append((self._detailed, step, result, now, step_s))
        else:
            self._ring.pending.append((COMMIT.pack, COMMITTED, now, step_s))
        if self._ended:
            self._tell_ended(step[1], result, events)

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._ended.append((request, reason))

    def _detailed(self, step: tuple[StepPlan, list[Request]], result: StepResult, now: float, step_s: float) -> bytes:
        """Return the entries of a committed step that has details."""
        plan, requests = step
        counts = bytes(map(len, result.tokens)) if plan.drafts or result.answers else b""
        mine = [i for i, request in enumerate(requests) if request.asked_by and result.tokens[i]]
        details = CommitDetails(
            draft_s=result.draft_s,
            counts=counts,
            errors={i: result.tokens[i][0] for i in mine if result.tokens[i][0] < 0},
            pooled={i: bool(answer) for i, answer in result.answers.items()},
            proposed={i: [self._kind(token) for token in tokens] for i, tokens in result.drafts.items()},
        )
        return COMMIT.pack(COMMITTED, now, step_s) + detail_entry(details)

    def _kind(self, token: int) -> int:
        return token if token == ON_DEVICE else ORDINARY if 0 <= token < self._vocab_size else NO_TOKEN

    def _tell_ended(self, requests: list[Request], result: StepResult, events: list[Event]) -> None:
        kept = {event.request: len(event.delta.token_ids) for event in events}
        for request, reason in self._ended:
            row = requests.index(request)
            token = min(0, *result.tokens[row][:1], 0)
            self._tell_end(request, reason, row, kept.get(request, 0), token)
        self._ended.clear()

    def _tell_ends(self) -> None:
        for request, reason in self._ended:
            self._tell_end(request, reason)
        self._ended.clear()

    def _tell_end(self, request: Request, reason: FinishReason, row: int = -1, kept: int = 0, token: int = 0) -> None:
        order = request.order[1]
        self._ring.hashes(order, request.prefix.hashes)
        self._ring.detail(Ended(order, request.request_id, reason, request.num_output, row, kept, token))

    # -- inputs --------------------------------------------------------------------------------------------

    def entering(self, given: Input) -> None:
        if isinstance(given, HandoffWentOn) and isinstance(given.event, Received | Failed):
            request = self._scheduler.parts[Handoffs].remote.receiving.get(given.event.handoff_id)
            self._arriving = request if request is not None and request.state is State.FINISHED else None

    def given(self, given: Input, now: float) -> None:
        if (record := self._without_text(given)) is not None:
            self._ring.record(record, now)
        self._tell_ends()
        if self._arriving is not None:  # its blocks have been cached since
            self._ring.hashes(self._arriving.order[1], self._arriving.prefix.hashes)
            self._arriving = None

    def _without_text(self, given: Input) -> Input | None:
        """Return what is recorded of an input; None if no decision depends on it."""
        match given:
            case Added(message):
                order = self._hashes_of([image.mm_hash for image in images_in(message)])
                return AddedShape.of(message, self._scheduler, order)
            case AddedRemote(asked_by):
                self._has_details = True
                order = self._hashes_of([image.mm_hash for image in images_in(asked_by)])
                return AddedRemoteShape.of(asked_by, self._vocab_size, order)
            case GrammarSet(request_id):
                return GrammarShape(request_id)
            case Aborted(request_id, reason, error):
                return AbortedShape(request_id, reason, kind_of(error))
            case HandoffWentOn(event):
                return self._handoff(event)
            case ImageWentOn(Received(handoff_id)):
                return ImageShape(number_of(handoff_id), None)
            case ImageWentOn(Failed(handoff_id, reason)):
                return ImageShape(number_of(handoff_id), reason)
            case ImageWentOn():
                return None
            case TiersAnswered(answers):
                listings = [one for one in answers if isinstance(one, StoreListing)]  # these come first
                return TiersAnsweredShape(
                    [StoreShape.of(one, self._hashes_of(StoreShape.names_of(one))) for one in listings],
                    [one for one in answers if isinstance(one, TierAnswer)],
                )
            case InputWithText():
                return given.without_text()
            case _:
                return given

    def _handoff(self, event: HandoffEvent) -> Input | None:
        token = event.first.token if isinstance(event, Received) and event.first.token < 0 else ORDINARY
        if any(reason == "stop" for _, reason in self._ended):
            token = stop_token(self._vocab_size)
        order = self._hashes_of(split_names(b"".join(event.names)) if isinstance(event, BlocksAsked) else [])
        return handoff_shape(event, token, order)

    def _hashes_of(self, hashes: list[bytes]) -> int:
        """Record hashes that belong to the next record. Returns the number under which they are on the tape."""
        if hashes:
            self._num_others += 1
            self._ring.hashes(-self._num_others, hashes)
        return -self._num_others


def planned_entry(now: float, plan: StepPlan) -> bytes:
    return PLAN.pack(PLANNED, now, digest(plan))


def goes_on_entry(now: float, num_rows: int, start: int, count: int, blocks: list[BlockChange]) -> bytes:
    """Return the entry of a step that only goes on. The arguments are those of digest_of_last."""
    return PLAN.pack(PLANNED, now, digest_of_last(num_rows, start, count, blocks))


@cache
def code_version() -> str:
    """Return the versions of Manta and Python, and a digest of the source on which a scheduler's decisions depend: of
    the core, of parts, and of all classes that its state consists of."""
    engine, digest = Path(__file__).parents[2], hashlib.blake2b(digest_size=8)
    files = {file for folder in ("core", "parts", "wire") for file in (engine / folder).rglob("*.py")}
    files = {file for file in files if file.parent.name != "rank"}
    kinds = [*(told.kind for told in KINDS.objects), *KINDS.messages, *KINDS.rows]
    files |= {Path(file) for kind in kinds if (file := getattr(sys.modules[kind.__module__], "__file__", None))}
    for path in sorted(files):
        digest.update(path.read_bytes())
    try:
        manta = version("manta-serve")
    except PackageNotFoundError:
        manta = "unknown"
    return f"manta {manta}, python {sys.version_info.major}.{sys.version_info.minor}, code {digest.hexdigest()}"
