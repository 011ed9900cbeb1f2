"""Schedulers with a tape, driven without a model."""

from __future__ import annotations

import tempfile
from copy import copy
from pathlib import Path

import msgspec

from cluster.lab.tape.replay import Replay
from engine.clock import Clock
from engine.costs.step_cost import StepTimes
from engine.parts.speculation.speculator import Speculator
from engine.parts.tape.engine_tape import EngineTape, tape_with_key
from engine.parts.tape.kept_tapes import KeptTapes
from engine.parts.tape.object_graph import Kinds
from engine.parts.tape.recorder import Tape
from engine.parts.tape.shared_copy import SHARED_MEMORY, read_copy
from engine.parts.tape.snapshot import KINDS
from tests.fake_caches import CacheHarness, TieredCacheHarness
from tests.fake_handoffs import DecodeHarness, PrefillHarness
from tests.fake_runner import BoundOfChunk, Harness
from tests.fake_tiers import TierHarness

KEY = b"a key of a tape."


class FixedCost:
    """(fixed, per token, per draft) seconds of a step, whatever is in it."""

    def __init__(self, *seconds: float):
        self.seconds = seconds

    def __call__(self, sequences: int) -> tuple[float, ...]:
        return self.seconds


def kinds_of_tests() -> Kinds:
    """What a state may consist of, with what harnesses have in place of a real engine's parts."""
    kinds = copy(KINDS)
    kinds.objects = [*KINDS.objects]
    kinds.add_objects(FixedCost, BoundOfChunk)
    kinds.schema = KINDS.schema  # what other processes write has no parts of tests
    return kinds


KEPT = KeptTapes(Path(tempfile.gettempdir(), "kept tapes of tests"), 1)


def attach(harness: Harness, max_bytes: int = 2**20, shared_root: Path | None = None, kept: KeptTapes = KEPT) -> Tape:
    """shared_root: folder for a copy, which is up to date after each step."""
    if (speculation := harness.scheduler.parts.get(Speculator)) is not None:
        speculation._step_cost = FixedCost(*speculation._step_cost(1))  # a lambda has no name by which to find it again
    clock = Clock(lambda: harness.now, lambda: harness.now)
    tape = Tape(
        harness.scheduler, StepTimes(), engine_id="e", role="", max_bytes=max_bytes, clock=clock, kept=kept,
        shared_root=shared_root,
    )  # fmt: skip
    tape.period_s = 0.0
    return tape


class TapedHarness(Harness):
    max_bytes = 2**20

    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self, self.max_bytes)


class CopiedHarness(Harness):
    """With a copy in shared memory, and a ring of few bytes, so that there are several segments, and the first is
    lost."""

    def __init__(self, **options):
        super().__init__(**options)
        self.shared_root = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
        self.tape = attach(self, 12_000, self.shared_root)

    def copy(self) -> EngineTape:
        (folder,) = self.shared_root.iterdir()
        return tape_of_bytes(msgspec.msgpack.encode(read_copy(folder, "").tape))


class TapedDecodeHarness(DecodeHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


class TapedCacheHarness(CacheHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


class TapedTierHarness(TierHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


class TapedTieredCacheHarness(TieredCacheHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


class TapedPrefillHarness(PrefillHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


def tape_of(tape: Tape) -> EngineTape:
    """The tape as it leaves the cluster."""
    return tape_of_bytes(tape.take())


def tape_of_bytes(taken: bytes) -> EngineTape:
    return msgspec.msgpack.decode(tape_with_key(taken, KEY), type=EngineTape)


def replay(tape: Tape) -> Replay:
    """Replay a tape to its end; the books balance after every call."""
    return replay_whole(tape_of(tape))


def replay_whole(tape: EngineTape) -> Replay:
    replay = Replay(tape)
    for _ in replay.run():
        replay.scheduler.check()
    return replay
