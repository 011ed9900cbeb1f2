"""Objects come back as they were, and bytes of anybody else give one error and nothing but objects of known classes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.parts.snapshot_kinds import Zeros
from engine.parts.tape import object_graph
from engine.parts.tape.object_graph import SCHEMA_BYTES, GraphReader, GraphWriter, Kinds, UnknownState

ENCODE = msgspec.msgpack.encode


@dataclass(eq=False)
class Part:
    value: Any = None
    others: Any = field(default_factory=list)

    def double(self) -> Any:
        return 2 * self.value


class Slotted:
    __slots__ = ("given", "one", "two")

    def __init__(self) -> None:
        self.one = 1  # `two` is set later, if at all


class Point(NamedTuple):
    x: int
    part: Part | None


class Letter(msgspec.Struct, frozen=True, array_like=True):
    text: str
    numbers: list[int]


def seven() -> int:
    return 7


def kinds() -> Kinds:
    found = Kinds()
    found.add_objects(Part)
    found.add_objects(Slotted, given="given")
    found.messages.append(Letter)
    found.rows.append(Point)
    found.constants |= {"seven": seven, "list": list}
    found.methods.append((Part, "double"))
    return found


def write(*roots: Any) -> bytes:
    return GraphWriter(kinds(), {}, {}).write(*roots)


def read(data: bytes) -> list[Any]:
    return GraphReader(kinds(), "given").read(data)


def test_objects_come_back_with_their_values_their_circles_and_what_they_share():
    shared = [1, "two", b"three", 4.5, None, True]
    first, second = Part(7, shared), Part(8, shared)
    first.others = {"me": first, ("a", 1): second, "shared": shared, "letter": Letter("hello", [1, 2])}
    a, b, method = read(write(first, second, first.double))
    assert a.others["me"] is a and a.others["a", 1] is b and a.others["shared"] is b.others
    assert b.others == shared and a.others["letter"] == Letter("hello", [1, 2])
    assert method.__self__ is a and method() == 14


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 7**90, -(7**90)])
def test_integers_of_any_size_come_back(number):
    part = Part(number, {"in a row": (number, Point(number, None)), number: [number]})
    (again, root, method) = read(write(part, number, part.double))
    assert (again.value, again.others, root, method()) == (number, part.others, number, 2 * number)


def test_containers_keep_their_class_and_order():
    found = defaultdict(list, {"a": [1]})
    ordered, part = OrderedDict.fromkeys([3, 1, 2]), Part(1)
    ordered.move_to_end(3)
    things = [ordered, Counter("aab"), deque([part, 2]), {1, 2}, frozenset({3}), Point(1, part), found, seven]
    (back,) = read(write(things))
    assert [type(one) for one in back] == [type(one) for one in things]
    assert list(back[0]) == [1, 2, 3] and back[0].popitem(last=False) == (1, None)
    assert back[1] == Counter("aab") and back[2][0] is back[5].part and back[3] == {1, 2} and back[4] == {3}
    assert back[6]["a"] == [1] and back[6]["b"] == [] and back[7] is seven


def test_a_field_that_is_not_set_stays_so_and_one_is_given():
    (back,) = read(write(Slotted()))
    assert back.one == 1 and not hasattr(back, "two") and back.given == "given"


def test_an_object_of_another_class_is_not_written():
    with pytest.raises(TypeError, match="Path is no part of a tape's state"):
        write([__import__("pathlib").PosixPath("/")])


def graph(roots: list[Any], *nodes: Any) -> bytes:
    return kinds().schema + ENCODE([roots, nodes])


PART, SLOTTED, LETTER = len(object_graph.CONTAINERS) + 1, len(object_graph.CONTAINERS) + 2, len(object_graph.CONTAINERS)
REF, ROW, CONSTANT, METHOD, ZEROS = range(5)
HOSTILE = {
    "a kind that there is not": graph([], [99, []]),
    "a negative kind": graph([], [-1, []]),
    "a kind that is a text": graph([], ["os.system", []]),
    "a node that there is not": graph([[REF, 3]]),
    "a negative node": graph([[REF, -1]], [0, []]),
    "a node that is a text": graph([[REF, "a"]], [0, []]),
    "a tag that there is not": graph([[9, 0]]),
    "a value without a tag": graph([[]]),
    "a mapping as a value": graph([{"a": 1}]),
    "a row that there is not": graph([[ROW, 99, []]]),
    "a row of another length": graph([[ROW, 2, [1, 2, 3]]]),
    "a row that cannot be hashed": graph([[ROW, 1, [[REF, 0]]]], [0, []]),
    "a constant that there is not": graph([[CONSTANT, 99]]),
    "a negative constant": graph([[CONSTANT, -1]]),
    "a method that there is not": graph([[METHOD, 0, 9]], [PART, [1, None]]),
    "a negative method": graph([[METHOD, 0, -1]], [PART, [1, None]]),
    "a method of another class": graph([[METHOD, 0, 0]], [0, []]),
    "too few fields": graph([], [PART, [1]]),
    "too many fields": graph([], [PART, [1, 2, 3]]),
    "fields by names": graph([], [PART, {"__class__": 1}]),
    "a message with other types": graph([], [LETTER, [1, "a"]]),
    "a message of too few fields": graph([], [LETTER, ["a"]]),
    "an odd number of keys and values": graph([], [1, [1, 2, 3]]),
    "a key that cannot be hashed": graph([], [1, [[REF, 0], 1]]),
    "a factory that is no class": graph([], [6, [[CONSTANT, 1]]]),
    "a factory that is missing": graph([], [6, []]),
    "no factory": graph([], [6, [None]]),
    "more tokens than there can be": graph([[ZEROS, 2**40, False]]),
    "fewer tokens than none": graph([[ZEROS, -1, False]]),
    "many lists of tokens": graph([[ZEROS, 2**24, False]] * 3),
    "values inside each other": kinds().schema + b"\x92\x91" + b"\x93\x01\x00\x91" * 100_000 + b"\x01\x90",
    "no roots": kinds().schema + ENCODE([]),
    "half": write(Part(1, [1, 2, 3]))[:-4],
    "nothing": kinds().schema,
    "something behind it": write(Part(1)) + b"\x00",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_no_writer_writes_gives_one_error(data):
    with pytest.raises(UnknownState):
        read(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x05N.", b"cos\nsystem\n(S'true'\ntR.", bytes(SCHEMA_BYTES) + write(Part(1))[SCHEMA_BYTES:]]
)
def test_a_graph_of_another_version_is_refused_before_anything_is_decoded(data, monkeypatch):
    monkeypatch.delattr(object_graph, "GRAPH")  # whatever would be decoded fails in another way
    with pytest.raises(UnknownState, match="another version"):
        read(data)


def test_a_class_with_another_field_is_another_version():
    @dataclass
    class Other:
        value: int
        others: int
        more: int = 0

    Other.__name__ = "Part"
    changed = kinds()
    changed.objects[0] = object_graph.ObjectKind(Other, None)
    assert changed.schema != kinds().schema == kinds().schema


def test_bytes_of_many_tokens_take_no_more_than_one_list():
    (back,) = read(write([Zeros(3), Zeros(2, packed=True)]))
    assert back[0] == [0, 0, 0] and back[1].tolist() == [0, 0] and back[1].typecode == "I"
