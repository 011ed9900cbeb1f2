"""Files of requests and of conversations."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import msgspec

from cluster.lab.simulator.conversations import mooncake, multi_turn, weka
from cluster.lab.simulator.conversations.dialogue import Ask, Ids
from cluster.lab.simulator.conversations.json_objects import decode, objects


class AnyObject(msgspec.Struct, frozen=True):
    """The fields by which formats differ."""

    requests: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    turns: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_json(path: Path, ids: Ids) -> tuple[list[Ask], int]:
    """Return the requests of a file, or of a folder of such files, and the tokens of a piece whose size `ids` does not
    tell. The first object says which format it is: that with `requests` is Weka's, with `turns` AIPerf's multi-turn
    format, else it is Mooncake's. Raises InvalidParameter that names line and field."""
    found = objects(path)
    if (first := next(found, None)) is None:
        return [], mooncake.PIECE
    kind, whole = decode(AnyObject, *first), chain([first], found)
    if kind.requests is not msgspec.UNSET:
        return weka.read(whole, ids)
    if kind.turns is not msgspec.UNSET:
        return multi_turn.read(whole, ids), mooncake.PIECE
    return mooncake.read(whole, ids), mooncake.PIECE
