"""Objects of a file of JSON, each with the place where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.errors import InvalidParameter

T = TypeVar("T")
SHOWN = 80  # bytes of an object that is refused


def objects(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the bytes of each object: of each line of a file, of a file whose first line is no object by
    itself, or of each file `*.json` of a folder."""
    if path.is_dir():
        for inside in sorted(path.glob("*.json")):
            yield from objects(inside)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                if number == 1 and not _is_json(line):
                    yield str(path), line + file.read()
                    return
                yield f"{path}:{number}", line


def decode(kind: type[T], place: str, data: bytes) -> T:
    """Return an object. Raises InvalidParameter that names its place, and the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except ValueError as error:
        if found := re.search(r"byte (\d+)", str(error)):
            before = data[: int(found[1])].count(b"\n")
            place = f"{place}:{before + 1}" if before else place
        shown = data[:SHOWN].decode(errors="replace")
        raise InvalidParameter(place, shown, f"a request or a conversation ({error})") from None


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True
