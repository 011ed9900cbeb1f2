"""Files of tapes: one tape for each engine of a cluster."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec

from engine.core.tape.ring import EngineTape
from engine.errors import InvalidParameter

MAX_BYTES = 2**32  # of a file that has been unpacked


def read_tapes(path: Path) -> list[EngineTape]:
    """Return the tapes in a file. Raises InvalidParameter."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(path.read_bytes(), MAX_BYTES)
        tapes = msgspec.msgpack.decode(data, type=list[bytes])
        return [msgspec.msgpack.decode(tape, type=EngineTape) for tape in tapes]
    except (zlib.error, msgspec.MsgspecError) as error:
        raise InvalidParameter("tape", str(path), f"a file written by `manta tape save` ({error})") from None


def pack_tapes(tapes: list[bytes]) -> bytes:
    """Return the content of a file. tapes: an EngineTape in msgpack each."""
    return zlib.compress(msgspec.msgpack.encode(tapes))
