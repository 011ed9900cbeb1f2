"""What messages say to and of parts. A message carries it encoded, by the part's name, so that only the ends of the
part need to know its form."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import msgspec

Records = dict[str, msgspec.Raw]
"""Records in msgpack, by the names of their parts."""
Attached = dict[str, Any]
"""Records by the names of their parts, in a message that mostly stays in its process: there as they are, elsewhere as
msgpack has decoded them."""


class PartRecord(msgspec.Struct, frozen=True):
    """What a message says to or of one part."""

    part: ClassVar[str]

    def without_text(self) -> Self:
        """Return what a tape keeps of it, from which the part decides the same."""
        return self

    def decided(self) -> tuple[int, ...]:
        """Return what of it a replay must decide alike."""
        return ()


R = TypeVar("R", bound=PartRecord)
Told = list[tuple[str, msgspec.Raw]]
"""Records in msgpack, each with the name of its part, of which some may have several."""


def encoded(*records: PartRecord | None) -> Records:
    """Return records as messages carry them, without those that are None."""
    return {each.part: msgspec.Raw(msgspec.msgpack.encode(each)) for each in records if each is not None}


def record_in(records: Records, kind: type[R]) -> R | None:
    """Return the record of this kind, or None if there is none. Raises msgspec.ValidationError."""
    raw = records.get(kind.part)
    return None if raw is None else decoded(raw, kind)


def told(records: Iterable[PartRecord]) -> Told:
    return [(each.part, msgspec.Raw(msgspec.msgpack.encode(each))) for each in records]


def attached(records: Attached, kind: type[R]) -> R | None:
    """Return the record of this kind, or None if there is none. Raises msgspec.ValidationError."""
    found = records.get(kind.part)
    return found if found is None or isinstance(found, kind) else msgspec.convert(found, kind)


def decoded(raw: msgspec.Raw, kind: type[R]) -> R:
    """Return the record in `raw`. Raises msgspec.ValidationError."""
    return _decoder(kind).decode(raw)


@cache
def _decoder(kind: type[R]) -> msgspec.msgpack.Decoder[R]:
    return msgspec.msgpack.Decoder(kind)
