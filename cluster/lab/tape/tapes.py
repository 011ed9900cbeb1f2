"""What to say of tapes that cannot be read or replayed. Those of another version can fail anywhere, with any error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from cluster.lab.tape.replay import Diverged
from deployments.parts.tape.choice_record import RouterTape
from engine.errors import InvalidParameter, ServingError
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.file import UNREADABLE, not_a_tape, read_file
from engine.parts.tape.object_graph import UnknownState
from engine.parts.tape.recorder import code_version


def read_routers(files: Sequence[Path]) -> list[RouterTape]:
    """Return the routers' tapes in some files. Raises InvalidParameter."""
    try:
        return [msgspec.msgpack.decode(tape, type=RouterTape) for file in files for tape in read_file(file).routers]
    except UNREADABLE as error:
        raise not_a_tape(" ".join(map(str, files)), error) from None


def other_versions(tapes: Iterable[EngineTape]) -> str:
    """Return which other versions have recorded some tapes, and which version this is; empty if all are of this one."""
    others = sorted({tape.version for tape in tapes} - {code_version()})
    return f"recorded by another version ({'; '.join(others)}; this is {code_version()})" if others else ""


def why_not(error: Exception, tapes: Iterable[EngineTape]) -> str:
    """Return why tapes do not replay. A damaged one can fail anywhere, with any error."""
    others = other_versions(tapes)
    told = str(error) if isinstance(error, Diverged | UnknownState) else f"{type(error).__name__}: {error}"
    return f"{told}; {others}" if others else told


def bytes_of(tapes: Iterable[EngineTape]) -> int:
    """Return the size of some tapes."""
    return sum(len(part) for tape in tapes for one in tape.segments for part in (one.state, one.entries, one.answers))


@contextmanager
def replayed(tapes: Sequence[EngineTape], files: Sequence[Path]) -> Iterator[None]:
    """Replay tapes of these files inside the block. Raises InvalidParameter for one that does not replay."""
    try:
        yield
    except (ServingError, OSError):
        raise
    except Exception as error:
        limit = f"one whose decisions this version makes again ({why_not(error, tapes)})"
        raise InvalidParameter("tape", " ".join(map(str, files)), limit) from error
