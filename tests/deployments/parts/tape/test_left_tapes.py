from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from deployments.parts.tape.left_tapes import LeftTapes
from engine.config import EngineConfig
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.file import read_tapes
from tests.engine.parts.tape.test_shared_copy import harness_in, kept, root, work

__all__ = ["kept", "root"]


@pytest.fixture
def config(tmp_path, root, monkeypatch) -> EngineConfig:
    monkeypatch.setattr("engine.parts.tape.shared_copy.shared_root", lambda: root)
    return EngineConfig(model="m", tape_mib=1, tape_dir=str(tmp_path / "kept"))


def test_a_replica_keeps_what_its_engine_has_left_and_says_why(root, kept, config, tmp_path):
    harness = harness_in(root, kept)
    work(harness)
    asyncio.run(LeftTapes(config, ["e"]).keep("rank 0 died"))
    (tape,) = read_tapes(*(tmp_path / "kept").iterdir())
    assert (tape.engine_id, tape.reason) == ("e", "rank 0 died")
    harness.tape.close()


def test_tapes_of_living_engines_are_written_with_the_reason(root, config, tmp_path):
    tape = EngineTape(engine_id="e", version="v", wall_s=0.0, role="", segments=[])
    asyncio.run(LeftTapes(config, ["e"]).write([msgspec.msgpack.encode(tape)], "first tokens are late"))
    (found,) = read_tapes(*(tmp_path / "kept").iterdir())
    assert found == msgspec.structs.replace(tape, cause="late", reason="first tokens are late")


def test_a_kept_tape_whose_file_has_just_gone_is_not_listed_and_hides_no_other(config, tmp_path):
    tapes, kept = LeftTapes(config, ["e"]), tmp_path / "kept"
    kept.mkdir()
    (kept / "a.tape").symlink_to(tmp_path / "gone")
    (kept / "b.tape").write_bytes(b"b")
    assert [tape.name for tape in asyncio.run(tapes.files())] == ["b.tape"]
    assert [asyncio.run(tapes.read(name)) for name in ("a.tape", "b.tape")] == [b"", b"b"]


def test_a_replica_that_ends_as_it_should_or_records_nothing_leaves_nothing(root, kept, config, tmp_path):
    harness = harness_in(root, kept)
    work(harness)
    without = LeftTapes(replace(config, tape_mib=0), ["e"])
    asyncio.run(without.keep("rank 0 died"))
    without.remove()
    assert len(list(root.iterdir())) == 1
    LeftTapes(config, ["e"]).remove()
    assert list(root.iterdir()) == [] and not (tmp_path / "kept").exists()
    harness.tape.close()
