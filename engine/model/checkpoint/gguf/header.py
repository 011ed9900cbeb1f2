"""Reads the header of a GGUF file: metadata, and where each tensor is. Anybody may have written the file, so each
number in it is compared with what the file can hold before it is used.

The package `gguf` reads headers too, but checks no lengths: a file of 60 bytes can make it take gigabytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from engine.model.checkpoint.gguf.config import GGUFError
from engine.model.checkpoint.gguf.entry import TYPES, Entry

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_BYTES = 256 << 20  # of metadata and names
MAX_ENTRIES = 1 << 22  # of one array; the largest vocabularies have 2 ** 18 tokens
MAX_TENSORS = 1 << 18
MAX_METADATA = 1 << 16
MAX_DIMS = 4
UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    UINT32: "I",
    5: "i",
    6: "f",
    7: "?",
    UINT64: "Q",
    11: "q",
    12: "d",
}  # as in `struct`
KEY_BYTES, TENSOR_BYTES = 13, 24  # at least
ALIGNMENT = 32


class Header:
    """The metadata and the tensors of one file. Raises GGUFError, naming the field, or OSError."""

    def __init__(self, file: Path):
        self._name, self._size, self._at = file.name, file.stat().st_size, 0
        if not self._size:
            raise GGUFError(f"{self._name} is empty")
        with file.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._end = min(self._size, MAX_BYTES)
        if self._take(4, "magic") != MAGIC:
            raise GGUFError(f"{self._name} is no GGUF file")
        version = self._number("I", "version")
        if version not in VERSIONS:
            raise self._refused("version", version, " or ".join(map(str, VERSIONS)))
        tensors = self._count("tensor_count", "Q", TENSOR_BYTES, MAX_TENSORS)
        keys = self._count("kv_count", "Q", KEY_BYTES, MAX_METADATA)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._string("name of a key")
            if name in self.metadata:
                raise self._refused("name of a key", name, "there once")
            self.metadata[name] = self._value(name, self._number("I", f"type of {name}"))
        stored = [self._tensor() for _ in range(tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        self.tensors: dict[str, Entry] = {}
        for name, shape, type, offset in stored:
            if name in self.tensors:
                raise self._refused("name of a tensor", name, "there once")
            self.tensors[name] = self._entry(name, shape, type, start + offset)

    @property
    def _alignment(self) -> int:
        found = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(found, int) or not 0 < found <= 1 << 20 or found & (found - 1):
            raise self._refused("general.alignment", found, "a power of two")
        return found

    def _entry(self, name: str, shape: tuple[int, ...], type: int, offset: int) -> Entry:
        from gguf import GGMLQuantizationType

        if type not in iter(GGMLQuantizationType):
            raise self._refused(f"type of {name}", type, "known")
        kind = GGMLQuantizationType(type).name
        entry = Entry(file=self._name, offset=offset, shape=shape, type=kind)
        if kind in TYPES:  # others are refused together, by name
            if shape[-1] % TYPES[kind][0]:
                raise self._refused(f"shape of {name}", shape, f"of whole blocks of {TYPES[kind][0]} numbers ({kind})")
            if offset + entry.nbytes > self._size:
                raise self._refused(f"end of {name}", offset + entry.nbytes, f"within the file's {self._size:,} bytes")
        return entry

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("name of a tensor")
        dims = self._number("I", f"dimensions of {name}")
        if not 0 < dims <= MAX_DIMS:
            raise self._refused(f"dimensions of {name}", dims, f"from 1 to {MAX_DIMS}")
        shape = tuple(self._number("Q", f"shape of {name}") for _ in range(dims))[::-1]
        if min(shape) < 1 or math.prod(shape) > 8 * self._size:  # no type takes less than a bit for a number
            raise self._refused(f"shape of {name}", shape, f"of what fits into {self._size:,} bytes")
        return name, shape, self._number("I", f"type of {name}"), self._number("Q", f"offset of {name}")

    def _value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self._string(name)
        if kind == ARRAY:
            return self._array(name)
        if kind not in SCALARS:
            raise self._refused(f"type of {name}", kind, "known")
        return self._number(SCALARS[kind], name)

    def _array(self, name: str) -> list[Any]:
        kind = self._number("I", f"type of {name}")
        if kind != STRING and kind not in SCALARS:
            raise self._refused(f"type of {name}", kind, "an array of numbers or texts")
        least = 8 if kind == STRING else struct.calcsize(f"<{SCALARS[kind]}")
        count = self._count(name, "Q", least, MAX_ENTRIES)
        if kind == STRING:
            return [self._string(name) for _ in range(count)]
        return list(struct.unpack(f"<{count}{SCALARS[kind]}", self._take(count * least, name)))

    def _count(self, name: str, kind: str, least: int, most: int) -> int:
        """Read a number of things of at least `least` bytes each, which follow."""
        count = self._number(kind, name)
        if count > (most := min(most, (self._end - self._at) // least)):
            raise self._refused(f"length of {name}", count, f"at most {most:,} in a file of {self._size:,} bytes")
        return count

    def _string(self, name: str) -> str:
        try:
            return self._take(self._number("Q", name), name).decode()
        except UnicodeDecodeError:
            raise GGUFError(f"{self._name}: {name} is no text") from None

    def _number(self, kind: str, name: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}"), name))[0]

    def _take(self, size: int, name: str) -> bytes:
        if size > (left := self._end - self._at):
            raise self._refused(f"length of {name}", size, f"at most {left:,} in a file of {self._size:,} bytes")
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _refused(self, field: str, value: object, limit: str) -> GGUFError:
        return GGUFError(f"{self._name}: {field[:100]} must be {limit}, got {str(value)[:100]}")
