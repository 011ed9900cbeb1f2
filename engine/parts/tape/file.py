"""Files of tapes: one tape for each engine and each router of a cluster."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import InvalidParameter
from engine.parts.tape.engine_tape import EngineTape

MAX_RATIO = 64  # of a file that has been unpacked to the file itself; those of engines have 2 to 10
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what it should decode."""
MIN_BYTES = 2**24  # up to which it may be unpacked, however small the file is


def is_tape(path: Path) -> bool:
    """Return whether a file may be one of tapes, which is compressed, and not one of text."""
    with path.open("rb") as file:
        return file.read(1) == b"x"  # of zlib


class TapeFile(msgspec.Struct):
    """Content of a file, before compression."""

    engines: list[bytes]
    """An EngineTape in msgpack each."""
    routers: list[bytes] = []
    """A RouterTape in msgpack each (deployments/parts/tape/choice_record.py)."""


def read_file(path: Path) -> TapeFile:
    """Return the content of a file. Raises InvalidParameter."""
    try:
        packed, unpacking = path.read_bytes(), zlib.decompressobj()
        data = unpacking.decompress(packed, max(MIN_BYTES, MAX_RATIO * len(packed)))
        if unpacking.unconsumed_tail:
            raise zlib.error(f"it unpacks to more than {len(data)} bytes")
        return msgspec.msgpack.decode(data, type=TapeFile)
    except (zlib.error, *UNREADABLE) as error:
        raise not_a_tape(str(path), error) from None


def read_all(files: Sequence[Path]) -> list[EngineTape]:
    """Return the tapes of all engines in some files. Raises InvalidParameter."""
    tapes = [tape for file in files for tape in read_tapes(file)]
    names, told = [tape.engine_id for tape in tapes], " ".join(map(str, files))
    if not names:
        raise InvalidParameter("tape", told, "a file with the tape of at least one engine")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidParameter("tape", told, f"files with one tape of each engine (two are of {twice[0]})")
    return tapes


def read_tapes(path: Path) -> list[EngineTape]:
    """Return the engines' tapes in a file. Raises InvalidParameter."""
    try:
        return [msgspec.msgpack.decode(tape, type=EngineTape) for tape in read_file(path).engines]
    except UNREADABLE as error:
        raise not_a_tape(str(path), error) from None


def not_a_tape(path: str, error: Exception) -> InvalidParameter:
    return InvalidParameter("tape", path, f"a file written by `manta tape save` ({error})")


def pack_tapes(engines: list[bytes], routers: Sequence[bytes] = ()) -> bytes:
    """Return the content of a file. The arguments are those of TapeFile."""
    return zlib.compress(msgspec.msgpack.encode(TapeFile(engines, list(routers))))
