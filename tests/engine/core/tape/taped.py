"""Schedulers with a tape, driven without a model."""

from __future__ import annotations

import msgspec

from engine.clock import Clock
from engine.core.costs.step_cost import StepTimes
from engine.core.tape.recorder import Tape
from engine.core.tape.replay import Replay
from engine.core.tape.ring import EngineTape, tape_with_key
from tests.fake_handoffs import DecodeHarness, PrefillHarness
from tests.fake_runner import Harness

KEY = b"a key of a tape."


class FixedCost:
    """(fixed, per token, per draft) seconds of a step, whatever is in it."""

    def __init__(self, *seconds: float):
        self.seconds = seconds

    def __call__(self, sequences: int) -> tuple[float, ...]:
        return self.seconds


def attach(harness: Harness, max_bytes: int = 2**20) -> Tape:
    speculation = harness.scheduler.speculation
    if hasattr(speculation, "_step_cost"):
        speculation._step_cost = FixedCost(*speculation._step_cost(1))  # a lambda has no name by which to find it again
    clock = Clock(lambda: harness.now, lambda: harness.now)
    return Tape(harness.scheduler, StepTimes(), engine_id="e", role="", max_bytes=max_bytes, clock=clock)


class TapedHarness(Harness):
    max_bytes = 2**20

    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self, self.max_bytes)


class TapedDecodeHarness(DecodeHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


class TapedPrefillHarness(PrefillHarness):
    def __init__(self, **options):
        super().__init__(**options)
        self.tape = attach(self)


def tape_of(tape: Tape) -> EngineTape:
    """The tape as it leaves the cluster."""
    return msgspec.msgpack.decode(tape_with_key(tape.take(), KEY), type=EngineTape)


def replay(tape: Tape) -> Replay:
    """Replay a tape to its end; the books balance after every call."""
    replay = Replay(tape_of(tape), trusted=("tests.",))
    for _ in replay.run():
        replay.scheduler.check()
    return replay
