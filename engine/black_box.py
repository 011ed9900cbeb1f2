"""What the process of an engine was doing when it ended, for whoever finds it dead.

Each rank has a small file in shared memory. While it reads an adapter, compiles a grammar or computes a request, the
file has an entry for that, so a process that dies in the middle leaves the entry behind. On a fatal signal such as
SIGSEGV, faulthandler writes a second file. A process that was killed from outside leaves none.
"""

from __future__ import annotations

import faulthandler
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import IO, Literal, NamedTuple
from urllib.parse import quote

from engine.user_folder import is_own_file, is_own_folder, new_private_file, own_folder

SHARED_MEMORY = Path("/dev/shm")
SLOTS = 1024
SLOT_BYTES = 128
HEAD = Struct("<q")  # process id
LENGTH = Struct("<H")  # bytes of the key that follows; written last
MAX_KEY_BYTES = SLOT_BYTES - LENGTH.size
Life = Literal["alive", "stopped", "dead"]


def read_key(adapter: str) -> str:
    """Return the key of an adapter that is being read. adapter: its digest."""
    return f"reads {adapter}"


def compile_key(kind: str, text: str) -> str:
    """Return the key of a grammar that is being compiled."""
    return f"compiles {hashlib.blake2b(f'{kind} {text}'.encode(), digest_size=16).hexdigest()}"


def compute_key(request_id: str) -> str:
    """Return the key of a request that takes part in steps. request_id: the handoff id of a RemoteRequest."""
    return f"computes {request_id}"


def ended_key(engine: str) -> str:
    """Return the key that tells one engine that has ended from others. It is added to what the engine was doing."""
    return f"ended {engine}"


class Found(NamedTuple):
    """What a process has left."""

    life: Life
    """Stopped: by a SIGSTOP or a debugger."""
    is_fatal: bool
    """Whether it died of a fatal signal that it got by itself."""
    doing: list[str]
    """Keys of its entries."""


class BlackBox:
    """The entries of this process. Until `open`, and where there is no shared memory, it records nothing. Thread-safe,
    since each call changes a container once."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._used: dict[str, int] = {}
        self._path: Path | None = None
        self._trace: IO[bytes] | None = None

    def open(self, path: Path) -> None:
        """Record in this file from now on, and in one beside it what a fatal signal interrupts. Raises OSError."""
        size = SLOT_BYTES * (SLOTS + 1)
        own_folder(path.parent)
        path.unlink(missing_ok=True)
        file = new_private_file(path, os.O_RDWR)
        try:
            os.posix_fallocate(file, 0, size)  # a full folder would end the process at some write
            memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        HEAD.pack_into(memory, 0, os.getpid())
        _trace_of(path).unlink(missing_ok=True)
        self._trace = open(_trace_of(path), "xb", opener=new_private_file)  # noqa: SIM115
        faulthandler.enable(self._trace, all_threads=False)
        self._free = [SLOT_BYTES * slot for slot in range(SLOTS, 0, -1)]
        self._path, self._memory = path, memory

    def begin(self, key: str) -> None:
        """Add an entry. If all slots are taken, it is missing."""
        memory = self._memory
        if memory is None or key in self._used or not self._free:
            return
        place = self._used[key] = self._free.pop()
        encoded = _encoded(key)
        memory[place + LENGTH.size : place + LENGTH.size + len(encoded)] = encoded
        LENGTH.pack_into(memory, place, len(encoded))

    def end(self, key: str) -> None:
        """Remove an entry, if there is one."""
        if self._memory is not None and (place := self._used.pop(key, None)) is not None:
            LENGTH.pack_into(self._memory, place, 0)
            self._free.append(place)

    @contextmanager
    def doing(self, key: str) -> Iterator[None]:
        self.begin(key)
        try:
            yield
        finally:
            self.end(key)

    def close(self) -> None:
        """Remove the files, because the process ends as it should."""
        if self._path is not None:
            self._memory, self._used = None, {}
            faulthandler.enable()
            remove(self._path)


BLACK_BOX = BlackBox()
"""That of this process. There is only one such object, since a process dies as a whole."""


def box_path(replica: str, rank: int) -> Path:
    """Return where a rank of a replica has its black box."""
    return SHARED_MEMORY / f"manta-engines-{os.getuid()}" / f"{quote(replica, safe='')}.{rank}"


def find(path: Path) -> Found | None:
    """Return what a process of this machine has left, or None if it has no black box here."""
    try:
        if not (is_own_folder(path.parent) and is_own_file(path)):
            return None
        content = path.read_bytes()
        (pid,) = HEAD.unpack_from(content)
        is_fatal = _trace_of(path).stat().st_size > 0
    except (OSError, ValueError):
        return None
    doing = []
    for place in range(SLOT_BYTES, len(content), SLOT_BYTES):
        (length,) = LENGTH.unpack_from(content, place)
        if length:
            start = place + LENGTH.size
            doing.append(content[start : start + length].decode(errors="replace"))
    return Found(_life(pid), is_fatal, doing)


def trace(path: Path) -> str:
    """Return what faulthandler has written about a fatal signal; empty if there was none."""
    with suppress(OSError):
        return _trace_of(path).read_text(errors="replace")
    return ""


def remove(path: Path) -> None:
    """Remove what a process has left."""
    for file in (path, _trace_of(path)):
        with suppress(OSError):
            file.unlink()


def remove_orphans(folder: Path) -> None:
    """Remove what dead processes have left in the folder of black boxes and nobody has looked at."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix != ".trace" and (found := find(path)) is not None and found.life == "dead":
                remove(path)


def _trace_of(path: Path) -> Path:
    return path.with_name(path.name + ".trace")


def _encoded(key: str) -> bytes:
    encoded = key.encode(errors="replace")
    if len(encoded) <= MAX_KEY_BYTES:
        return encoded
    return f"{key[:20]}.. {hashlib.blake2b(encoded, digest_size=16).hexdigest()}".encode()[:MAX_KEY_BYTES]


def found_keys(doing: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Return those of these keys that are among the entries. doing: keys of a black box, as errors carry them."""
    found = set(doing)
    return [key for key in keys if _encoded(key).decode() in found]


def _life(pid: int) -> Life:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "dead"
    return "stopped" if state in "tT" else "dead" if state in "ZX" else "alive"
