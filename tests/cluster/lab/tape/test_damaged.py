"""A tape that was damaged, or made by somebody who means harm, is read or refused by a typed error."""

from __future__ import annotations

import zlib
from random import Random

import msgspec
import pytest

from cluster.lab.tape import replay_limits as limits
from cluster.lab.tape.replay import Diverged, Replay
from cluster.lab.tape.replay_limits import TapeTooExpensive, replay_limits, watched
from engine.errors import InvalidParameter
from engine.parts.tape.engine_tape import EngineTape, Segment, tape_with_key
from engine.parts.tape.file import MIN_BYTES, TapeFile, pack_tapes, read_tapes
from engine.parts.tape.inputs import AddedShape
from engine.parts.tape.object_graph import SCHEMA_BYTES, UnknownState
from engine.parts.tape.ring import record_entry
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.engine.parts.tape.taped import KEY, TapedHarness
from tests.examples import examples


@pytest.fixture(scope="module")
def taken() -> bytes:
    """A tape whose state has running and waiting requests, and cached blocks."""
    harness = TapedHarness(num_blocks=20, max_model_len=48, max_num_seqs=3)
    for i in range(7):
        harness.add(f"r{i}", [1, 2, 3, 4, 5, 6, 7, 8, 9 + i], max_tokens=12)
        harness.step()
    harness.tape._begin()
    harness.run()
    tape = msgspec.msgpack.decode(harness.tape.take(), type=EngineTape)
    assert len(tape.segments) == 2
    return tape_with_key(msgspec.msgpack.encode(msgspec.structs.replace(tape, segments=tape.segments[1:])), KEY)


def mutated(data: bytes, random: Random) -> bytes:
    """With some bytes changed, left out, or put in."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        place, size = random.randrange(len(found)), random.choice((1, 1, 2, 4, 9))
        match random.randrange(5):
            case 0:
                found[place] ^= 1 << random.randrange(8)
            case 1:
                found[place : place + size] = random.randbytes(size)
            case 2:
                del found[place : place + size]
            case 3:
                found[place:place] = random.choice((b"\xcf" + b"\x7f" * 8, b"\xff", b"\xc0", b"\xdd\xff\xff\xff\xff"))
            case 4:
                found[place : place + 9] = b"\xcf\x00\x00\x00" + random.randbytes(5)  # a number of many digits
    return bytes(found)


def read(tmp_path, data: bytes) -> str:
    """What becomes of a file: nothing else may come out of it than these."""
    (file := tmp_path / "damaged.tape").write_bytes(data)
    try:
        for tape in read_tapes(file):
            replay = Replay(tape)
            for _ in replay.run():
                pass
    except (InvalidParameter, UnknownState, Diverged) as error:
        return type(error).__name__
    return "read"


PARTS = ("file", "tape", "state", "entries")


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_tape_is_read_or_refused_by_a_typed_error(part, taken, tmp_path):
    outcomes = set()
    with replay_limits(0):
        for seed in range(examples(800)):
            random, tape = Random(f"{part}{seed}"), msgspec.msgpack.decode(taken, type=EngineTape)
            (segment,) = tape.segments
            if part == "state":
                segment.state = segment.state[:SCHEMA_BYTES] + mutated(segment.state[SCHEMA_BYTES:], random)
            elif part == "entries":
                segment.entries = mutated(segment.entries, random)
            packed = msgspec.msgpack.encode(tape)
            if part == "tape":
                packed = mutated(packed, random)
            data = pack_tapes([packed])
            if part == "file":
                data = zlib.compress(mutated(zlib.decompress(data), random)) if seed % 2 else mutated(data, random)
            outcomes.add(read(tmp_path, data))
    assert outcomes - {"read"}, "nothing was refused"


def test_the_undamaged_tape_is_read(taken, tmp_path):
    assert read(tmp_path, pack_tapes([taken])) == "read"


@pytest.mark.parametrize("count", [-1, 2**40, 2**63 - 1])
def test_a_prompt_that_no_model_reads_is_refused(count, taken):
    tape = msgspec.msgpack.decode(taken, type=EngineTape)
    message = GenerateRequest(request_id="large", prompt=[], params=SamplingParams())
    tape.segments[0].entries = record_entry(AddedShape(count, message), 0.0)
    with pytest.raises(Diverged, match="ValueError: a prompt of"):
        Replay(tape).step()


@pytest.mark.parametrize("at", [float("nan"), float("inf"), -1e300, 1e300])
def test_a_time_that_no_calendar_has_is_refused(at, taken):
    tape = msgspec.msgpack.decode(taken, type=EngineTape)
    with pytest.raises(UnknownState, match="no time"):
        Replay(msgspec.structs.replace(tape, wall_s=at))


def test_a_tape_without_segments_is_refused(taken):
    tape = msgspec.msgpack.decode(taken, type=EngineTape)
    with pytest.raises(UnknownState, match="no segments"):
        Replay(msgspec.structs.replace(tape, segments=[]))


def test_a_file_does_not_unpack_to_much_more_than_its_own_size(tmp_path):
    tape = EngineTape(
        engine_id="e", version="", wall_s=0, role="", segments=[Segment(0.0, bytes(2 * MIN_BYTES), b"", b"")]
    )
    (file := tmp_path / "bomb.tape").write_bytes(pack_tapes([msgspec.msgpack.encode(tape)]))
    with pytest.raises(InvalidParameter, match="unpacks to more than"):
        read_tapes(file)


def test_a_file_that_nests_without_end_is_refused(tmp_path):
    (file := tmp_path / "deep.tape").write_bytes(zlib.compress(b"\x91" * 1_000_000))
    with pytest.raises(InvalidParameter):
        read_tapes(file)
    packed = msgspec.msgpack.encode(TapeFile([b"\x91" * 1_000_000]))
    file.write_bytes(zlib.compress(packed))
    with pytest.raises(InvalidParameter):
        read_tapes(file)


def test_a_moment_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(limits, "MOMENT_S", 0.02)

    def never_ends() -> None:
        while True:
            pass

    with replay_limits(0), watched("a moment"), pytest.raises(TapeTooExpensive):
        never_ends()


def test_time_outside_of_a_moment_does_not_count(monkeypatch):
    monkeypatch.setattr(limits, "MOMENT_S", 0.005)
    with replay_limits(0):
        for number in range(20):
            with watched(number):
                sum(range(20_000))
            sum(range(50_000))


def test_memory_is_limited_inside_and_not_afterwards():
    with replay_limits(0), pytest.raises(MemoryError):
        bytearray(2 * limits.SPARE_BYTES)
    assert len(bytearray(16)) == 16
