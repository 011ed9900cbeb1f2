"""What messages say to and of parts. A message carries it encoded, by the part's name, so that only the ends of the
part need to know its form."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from engine.errors import RequestError

Records = dict[str, msgspec.Raw]
"""Records in msgpack, by the names of their parts."""
Attached = dict[str, Any]
"""Records by the names of their parts, in a message that mostly stays in its process: there as they are, elsewhere as
msgpack has decoded them."""


class PartRecord(msgspec.Struct, frozen=True):
    """What a message says to or of one part."""

    part: ClassVar[str]
    is_hint: ClassVar[bool] = False
    """Whether an engine without the part ignores it in a request, instead of refusing the request."""

    def without_text(self) -> Self:
        """Return what a tape keeps of it, from which the part decides the same."""
        return self

    def decided(self) -> tuple[int, ...]:
        """Return what of it a replay must decide alike."""
        return ()


R = TypeVar("R", bound=PartRecord)
Told = list[tuple[str, msgspec.Raw]]
"""Records in msgpack, each with the name of its class."""


def encoded(*records: PartRecord | None) -> Records:
    """Return records as messages carry them, without those that are None."""
    return {each.part: msgspec.Raw(msgspec.msgpack.encode(each)) for each in records if each is not None}


def record_in(records: Records, kind: type[R]) -> R | None:
    """Return the record of this kind, or None if there is none. Raises msgspec.ValidationError."""
    raw = records.get(kind.part)
    return None if raw is None else decoded(raw, kind)


def told(records: Iterable[PartRecord]) -> Told:
    return [(type(each).__name__, msgspec.Raw(msgspec.msgpack.encode(each))) for each in records]


def attached(records: Attached, kind: type[R]) -> R | None:
    """Return the record of this kind, or None if there is none. Raises msgspec.ValidationError."""
    found = records.get(kind.part)
    return found if found is None or isinstance(found, kind) else msgspec.convert(found, kind)


def decoded(raw: msgspec.Raw, kind: type[R]) -> R:
    """Return the record in `raw`. Raises msgspec.ValidationError."""
    return _decoder(kind).decode(raw)


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """A request that asks for something of parts of an engine."""

    needs: Attached = {}
    """What it asks for. An engine without one of these parts refuses the request."""
    hints: Attached = {}
    """What it tells parts besides."""

    def record(self, kind: type[R]) -> R | None:
        """Return the record of this kind, or None if there is none. Raises RequestError if it has another form."""
        try:
            return attached(self.hints if kind.is_hint else self.needs, kind)
        except msgspec.ValidationError as error:
            raise RequestError(f"the record of {kind.part} is not valid: {error}") from None

    def asking(self, *records: PartRecord | None) -> Self:
        """Return the request with these records too."""
        given = [each for each in records if each is not None]
        needs = self.needs | {each.part: each for each in given if not each.is_hint}
        hints = self.hints | {each.part: each for each in given if each.is_hint}
        return msgspec.structs.replace(self, needs=needs, hints=hints)


@cache
def _decoder(kind: type[R]) -> msgspec.msgpack.Decoder[R]:
    return msgspec.msgpack.Decoder(kind)
