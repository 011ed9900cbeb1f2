"""A state is data: it runs nothing, and its classes are those of a scheduler's parts."""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from pathlib import Path

import msgspec
import pytest

from cluster.lab.tape.replay import Replay
from engine.core.door.journal import Journal
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.tape.answers import STAND_INS, Answers
from engine.parts.tape.engine_tape import EngineTape, Segment
from engine.parts.tape.file import pack_tapes, read_tapes
from engine.parts.tape.object_graph import UnknownState, fields_of
from engine.parts.tape.recorder import code_version
from engine.parts.tape.snapshot import CHANGES, KINDS, load
from tests.engine.parts.tape.taped import TapedHarness

IMPORTED = b"cengine.parts.tape.inputs\nattrgetter\n"
RUNS_A_PROGRAM = (
    IMPORTED + b"(S'system'\ntR(" + IMPORTED + b"(S'home.__func__.__globals__.__getitem__'\ntR"
    b"(cengine.parts.tape.kept_tapes\nPath\ntR(S'os'\ntRtR(S'touch %s'\ntR."
)
"""A pickle that calls what other modules import, as earlier versions let it."""

OF_NO_STATE = {
    # what only lives during a call, or is written in another form
    "Part", "BlockObserver", "HashChanges", "StepWork", "Arrived", "Ended", "PrefillDecision",
    "PendingPrompt", "LocalLoad", "Event", "Offer", "WantedPrefix",
    # what covers a scheduler's parts while they are recorded, and what reads a tape
    "Answers", "TapedDrafter", "DrafterWatch", "TapedGrammar", "TapedNames", "StandIn",
}  # fmt: skip


def test_a_file_that_was_made_to_run_a_program_runs_nothing(tmp_path):
    state = RUNS_A_PROGRAM % bytes(tmp_path / "ran")
    tape = EngineTape(engine_id="e", version="", wall_s=0.0, role="", segments=[Segment(0.0, state, b"", b"")])
    (file := tmp_path / "evil.tape").write_bytes(pack_tapes([msgspec.msgpack.encode(tape)]))
    (found,) = read_tapes(file)
    with pytest.raises(UnknownState, match="another version"):
        Replay(found)
    assert not (tmp_path / "ran").exists()


def test_a_state_that_is_no_scheduler_is_refused():
    part = KINDS.schema + msgspec.msgpack.encode([[1, 2], []])
    with pytest.raises(UnknownState, match="it is no scheduler"):
        load(part, Answers())


def test_every_class_of_a_part_of_the_scheduler_can_be_in_a_state():
    """A part that is missing would end every tape of an engine that has it."""
    of_states = {each.kind for each in KINDS.objects} | {*KINDS.messages} | {*KINDS.rows}
    modules = {each.kind.__module__ for each in KINDS.objects} - {"engine.model.state", "engine.wire.handoff"}
    missing = [
        name
        for module in modules
        for name, found in vars(sys.modules[module]).items()
        if inspect.isclass(found) and found.__module__ == module and found not in of_states
        if not (issubclass(found, Enum | BaseException) or getattr(found, "_is_protocol", False))
        if name not in OF_NO_STATE
    ]
    assert not missing


def test_what_is_changed_in_a_state_are_fields_of_its_objects():
    told = {each.kind: each.fields for each in KINDS.objects}
    assert CHANGES.keys() <= told.keys()
    assert [each.given for each in KINDS.objects if each.kind in STAND_INS] == ["_answers"] * len(STAND_INS)


def test_no_object_has_a_field_that_its_class_does_not_declare():
    """It would not be in the state."""
    harness = TapedHarness(num_blocks=64, max_model_len=64, handoffs=Handoffs())
    harness.add("a", [1, 2, 3, 4, 5])
    harness.step()
    scheduler, times = load(harness.tape._ring.segments[-1].state, Answers())
    seen, todo = set(), [scheduler, times, harness.scheduler]
    while todo:
        thing = todo.pop()
        if isinstance(thing, list | tuple):
            todo += thing
            continue
        inside = getattr(thing, "__dict__", {})
        if id(thing) in seen or not type(thing).__module__.startswith("engine.") or isinstance(thing, Journal | Enum):
            continue
        seen.add(id(thing))
        assert inside.keys() <= {*fields_of(type(thing))}, type(thing)
        todo += [getattr(thing, name, None) for name in fields_of(type(thing))]
    assert len(seen) > 40


def test_the_version_of_the_code_covers_the_core_and_all_parts(monkeypatch):
    """Also their files without a class that is in a state: decisions depend on them."""
    read = set[Path]()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path) or b"")
    code_version.__wrapped__()  # not the one that is remembered
    engine = Path(__file__).parents[4] / "engine"
    files = {file for folder in ("core", "parts") for file in (engine / folder).rglob("*.py")}
    assert {file for file in files if file.parent.name != "rank"} <= read
