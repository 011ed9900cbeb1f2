"""Records in calls of Serve, which pickles what it carries."""

from __future__ import annotations

from typing import Any

import msgspec


class Carried:
    """A record on its way: who is called gets the record itself.

    Pickle would give the class all values in the order in which the caller's version declares its fields. In msgpack
    either side may have further fields, as in all other messages.
    """

    def __init__(self, record: msgspec.Struct):
        self._record = record

    def __reduce__(self) -> tuple[Any, ...]:
        return read_carried, (type(self._record), msgspec.msgpack.encode(self._record))


def read_carried(kind: type[msgspec.Struct], data: bytes) -> msgspec.Struct:
    """Return a carried record. Raises msgspec.ValidationError. Other versions call it by its name."""
    return msgspec.msgpack.decode(data, type=kind)
