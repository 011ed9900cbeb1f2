"""A copy of an engine's tape in shared memory, which outlives the process of the engine.

An engine whose step fails writes its tape itself. One that is killed, or hangs, cannot. So each engine has a folder in
/dev/shm, in which each segment is a file that grows; the newest second may be missing. Hashes of blocks have no
key there, as in the engine's own memory, so only this user can read the files, and they never reach a disk as they are.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from struct import Struct

import msgspec

from engine.core.request import Request
from engine.parts.tape.engine_tape import HEAD, EngineTape, Segment
from engine.parts.tape.kept_tapes import KeptTapes, file_name
from engine.parts.tape.ring import hashes_entry
from engine.user_folder import is_own_folder, new_private_file, own_folder
from engine.wire.block_hash import BLOCK_HASH_BYTES

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
STATE, ENTRIES, ANSWERS, MORE_HASHES = range(4)  # kinds of the parts of a segment's file
STARTED = Struct("<d")
MORE = Struct("<qI")  # number of arrival of a request, and how many more of its hashes follow
HEAD_FILE = "head"  # a CopyHead; its lock is held as long as the engine lives


class CopyHead(msgspec.Struct, array_like=True):
    tape: EngineTape
    """Without segments in HEAD_FILE."""
    folder: str
    """Where the tape is to be kept, as in KeptTapes, whoever finds the copy."""
    max_files: int


def shared_root() -> Path:
    """Return the folder of all copies of this user."""
    return SHARED_MEMORY / f"manta-tapes-{os.getuid()}"


class NoCopy:
    """Keeps nothing."""

    is_open = False

    def begin(self, state: bytes, started_at: float, num_segments: int) -> None:
        pass

    def update(self, entries: bytearray, answers: bytearray, requests: Iterable[Request]) -> None:
        pass

    def close(self) -> None:
        pass


class SharedCopy(NoCopy):
    """The copy of one engine. If shared memory is full, it ends."""

    def __init__(self, head: EngineTape, root: Path, kept: KeptTapes):
        """head: the tape without its segments. Raises OSError."""
        own_folder(root)
        self.is_open = True
        self._folder = Path(tempfile.mkdtemp(prefix=f"{file_name(head.engine_id)}.", dir=root))  # only for this user
        self._lock = _create(self._folder / HEAD_FILE)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, msgspec.msgpack.encode(CopyHead(head, str(kept.folder.absolute()), kept.max_files)))
        self._file = -1
        self._number = 0  # of the newest segment
        self._num_entries = self._num_answers = 0  # bytes of it that are copied
        self._known: dict[int, int] = {}  # hashes of live requests that are copied, by number of arrival

    def begin(self, state: bytes, started_at: float, num_segments: int) -> None:
        """Begin a segment. num_segments: how many the ring keeps with it."""
        if not self.is_open:
            return
        with self._ends_if_full():
            self._close_file()
            self._number += 1
            self._file = _create(self._folder / f"{self._number:09d}")
            self._num_entries = self._num_answers = 0
            self._known = {}
            _write(self._file, _part(STATE, STARTED.pack(started_at) + state))
            for file in _segments(self._folder):
                if int(file.name) <= self._number - num_segments:
                    file.unlink()

    def update(self, entries: bytearray, answers: bytearray, requests: Iterable[Request]) -> None:
        """Copy what is new. entries, answers: all of the newest segment. requests: live ones."""
        parts = b""
        if len(entries) > self._num_entries:
            parts = _part(ENTRIES, bytes(entries[self._num_entries :]))
        if len(answers) > self._num_answers:
            parts += _part(ANSWERS, bytes(answers[self._num_answers :]))
        known, self._known = self._known.get, {}
        more: list[bytes] = []
        for request in requests:
            order, hashes = request.order[1], request.prefix.hashes
            count, before = len(hashes), known(order, 0)
            self._known[order] = count
            if count > before:
                more.append(MORE.pack(order, count - before))
                more += hashes[before:]
        if more:
            parts += _part(MORE_HASHES, b"".join(more))
        if parts:
            with self._ends_if_full():
                _write(self._file, parts)
        self._num_entries, self._num_answers = len(entries), len(answers)

    def close(self) -> None:
        """Remove the copy."""
        self.is_open = False
        self._close_file()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _ends_if_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("the tape in %s ends, so it will be lost if the engine is killed: %s", self._folder, error)
            self.close()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_copy(head: EngineTape, root: Path, kept: KeptTapes) -> NoCopy:
    """Return a copy in this folder, or none if there cannot be one. kept: where its file goes if the engine is gone."""
    try:
        return SharedCopy(head, root, kept)
    except OSError as error:
        logger.warning("the tape of engine %s will be lost if it is killed: %s", head.engine_id, error)
        return NoCopy()


# -- copies of engines that are gone -----------------------------------------------------------------------


def keep_orphans(root: Path) -> None:
    """Keep the tapes of engines that are gone, and that nobody has removed."""
    for folder in _folders(root):
        with suppress(OSError):  # another process looks at it, or its engine lives
            lock = os.open(folder / HEAD_FILE, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_size:  # else it is just being made
                    keep_copy(folder)
            finally:
                os.close(lock)


def keep_copies_of(engine_ids: Iterable[str], reason: str, root: Path) -> None:
    """Keep the tapes of these engines on this machine, which have ended or hang."""
    for folder in _folders_of(engine_ids, root):
        keep_copy(folder, reason)


def remove_copies_of(engine_ids: Iterable[str], root: Path) -> None:
    """Remove the copies of these engines on this machine, which have ended as they should."""
    for folder in _folders_of(engine_ids, root):
        shutil.rmtree(folder, ignore_errors=True)


def keep_copy(folder: Path, reason: str = "") -> None:
    """Make a file of a copy, where its engine would have made it, and remove the copy. reason: why its engine has
    ended; empty if that is found out from the copy."""
    try:
        copy = read_copy(folder, reason)
        if copy.tape.segments:
            path = KeptTapes(Path(copy.folder), copy.max_files).keep(copy.tape)
            whose = f"the tape of {copy.tape.engine_id} is kept, because {copy.tape.reason}"
            logger.error("%s: `manta replay %s` shows its last steps", whose, path)
    except Exception as error:  # noqa: BLE001  whoever looks at it has an engine to start, and it may be any version's
        logger.error("the tape in %s cannot be kept: %s: %s", folder, type(error).__name__, error)
    shutil.rmtree(folder, ignore_errors=True)


def read_copy(folder: Path, reason: str) -> CopyHead:
    """Return the tape in a copy, and where it is to be kept. reason: as for keep_copy. Raises OSError and
    MsgspecError."""
    head = msgspec.msgpack.decode((folder / HEAD_FILE).read_bytes(), type=CopyHead)
    hashes: dict[int, bytes] = {}
    segments: list[Segment] = []
    for file in _segments(folder):
        state, entries, answers, of_segment = b"", b"", b"", dict[int, bytes]()
        for kind, data in _parts(file.read_bytes()):
            if kind == STATE:
                state = data
            elif kind == ENTRIES:
                entries += data
            elif kind == ANSWERS:
                answers += data
            else:
                for order, more in _more_hashes(data):
                    of_segment[order] = of_segment.get(order, b"") + more
        if state:
            (started_at,) = STARTED.unpack_from(state)
            segments.append(Segment(started_at, state[STARTED.size :], entries, answers))
            hashes |= of_segment
    if segments:  # at the start, so that later entries with all hashes of a request replace these
        segments[0].entries = b"".join(map(_entry, hashes.items())) + segments[0].entries
    if not reason:
        ends_at = datetime.fromtimestamp(max(file.stat().st_mtime for file in folder.iterdir()), UTC)
        reason = f"a process of the engine was killed or crashed after {ends_at:%F %T} UTC"
    head.tape = msgspec.structs.replace(head.tape, segments=segments, cause="ended", reason=reason)
    return head


def _entry(known: tuple[int, bytes]) -> bytes:
    order, hashes = known
    return hashes_entry(order, [hashes[i : i + BLOCK_HASH_BYTES] for i in range(0, len(hashes), BLOCK_HASH_BYTES)])


def _more_hashes(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(data):
        order, count = MORE.unpack_from(data, place)
        start, place = place + MORE.size, place + MORE.size + count * BLOCK_HASH_BYTES
        yield order, data[start:place]


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and content of the parts of a file, as far as they are whole."""
    place = 0
    while place + HEAD.size <= len(data):
        kind, size = HEAD.unpack_from(data, place)
        place += HEAD.size
        if place + size > len(data):
            return
        yield kind, data[place : place + size]
        place += size


def _part(kind: int, data: bytes) -> bytes:
    return HEAD.pack(kind, len(data)) + data


def _folders(root: Path) -> list[Path]:
    """Return the folders of copies; none if another user may have made them."""
    return [folder for folder in root.iterdir() if is_own_folder(folder)] if is_own_folder(root) else []


def _folders_of(engine_ids: Iterable[str], root: Path) -> list[Path]:
    names = set(map(file_name, engine_ids))
    return [folder for folder in _folders(root) if folder.name.rpartition(".")[0] in names]


def _segments(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.isdecimal())


def _create(path: Path) -> int:
    return new_private_file(path, os.O_WRONLY)


def _write(file: int, data: bytes) -> None:
    if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
