"""Files of tapes: one tape for each engine of a cluster."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.core.tape.ring import EngineTape
from engine.errors import InvalidParameter

MAX_BYTES = 2**32  # of a file that has been unpacked


def is_tape(path: Path) -> bool:
    """Return whether a file may be one of tapes, which is compressed, and not one of text."""
    with path.open("rb") as file:
        return file.read(1) == b"x"  # of zlib


def read_tapes(path: Path) -> list[EngineTape]:
    """Return the tapes in a file. Raises InvalidParameter."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(path.read_bytes(), MAX_BYTES)
        tapes = msgspec.msgpack.decode(data, type=list[bytes])
        return [msgspec.msgpack.decode(tape, type=EngineTape) for tape in tapes]
    except (zlib.error, msgspec.MsgspecError) as error:
        raise InvalidParameter("tape", str(path), f"a file written by `manta tape save` ({error})") from None


def read_all(files: Sequence[Path]) -> list[EngineTape]:
    """Return the tapes of all engines in some files. Raises InvalidParameter."""
    tapes = [tape for file in files for tape in read_tapes(file)]
    names, told = [tape.engine_id for tape in tapes], " ".join(map(str, files))
    if not names:
        raise InvalidParameter("tape", told, "a file with the tape of at least one engine")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidParameter("tape", told, f"files with one tape of each engine (two are of {twice[0]})")
    return tapes


def pack_tapes(tapes: list[bytes]) -> bytes:
    """Return the content of a file. tapes: an EngineTape in msgpack each."""
    return zlib.compress(msgspec.msgpack.encode(tapes))
