"""Objects that refer to each other, as data: numbered nodes, whose values are numbers, texts or numbers of nodes.

The reader takes nothing from the bytes but data: the kind of a node is its place in a closed list of classes, of which
it allocates objects and sets the declared fields. It calls nothing by a name in the bytes. What it allocates is limited
by their number, but for zeros, which have a limit of their own.
"""

from __future__ import annotations

import dis
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from operator import attrgetter
from types import FunctionType, MethodType, NoneType
from typing import Any

import msgspec

from engine.parts.snapshot_kinds import Zeros
from engine.wire.block_hash import BLOCK_HASH_BYTES

SCHEMA_BYTES = 16
MAX_ZEROS = 2**25  # of all lists of a graph together
MISSING: Any = type("Missing", (), {})()
"""Stands for the value of a field that is not set."""


class UnknownState(Exception):
    """The bytes are not objects that this version has written."""


class Ref(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    node: int


class Row(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A tuple, or anything else that never changes and is made of its items."""

    kind: int
    items: list[Any]
    """Values."""


class Constant(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    number: int


class Method(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A method of an object."""

    node: int
    number: int


class LongInt(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """An integer that MessagePack has no form for: outside [-2**63, 2**64)."""

    digits: str
    """Hexadecimal."""


LEAVES = frozenset({int, float, str, bytes, bool, NoneType})
"""Types of values that stand for themselves. Any other value is one of those above."""
OTHERS = (Ref, Row, Constant, Method, Zeros, LongInt)
WRITTEN = frozenset({Zeros})  # values that are written as they are
CONTAINERS: tuple[type, ...] = (list, dict, set, deque, OrderedDict, Counter, defaultdict)


class Node(msgspec.Struct, array_like=True):
    kind: int
    """Index into the containers, then the messages, then the objects."""
    content: msgspec.Raw
    """A message, or a list of values: those of the fields; of a container its items, of a mapping keys and values in
    turns, of a defaultdict its factory before them."""


class ObjectGraph(msgspec.Struct, array_like=True):
    roots: list[Any]
    """Values."""
    nodes: list[Node]


class AnyNode(msgspec.Struct, array_like=True):
    kind: int
    content: Any


class AnyGraph(msgspec.Struct, array_like=True):
    """A graph whose kinds do not matter."""

    roots: list[Any]
    nodes: list[AnyNode]


ENCODER = msgspec.msgpack.Encoder()
GRAPH = msgspec.msgpack.Decoder(ObjectGraph)
ANY_GRAPH = msgspec.msgpack.Decoder(AnyGraph)
VALUES = msgspec.msgpack.Decoder(list[Any])


def fields_of(kind: type) -> tuple[str, ...]:
    """Return the fields that a class declares: those that it annotates or has slots for, and those that its `__init__`
    sets."""
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__[:-1]):
        inside = vars(base)
        annotated = inside.get("__annotations__", {})
        names |= dict.fromkeys(name for name, told in annotated.items() if not str(told).startswith("ClassVar"))
        slots = inside.get("__slots__", ())
        names |= dict.fromkeys([slots] if isinstance(slots, str) else slots)
        if isinstance(init := inside.get("__init__"), FunctionType):
            names |= dict.fromkeys(each.argval for each in dis.get_instructions(init) if each.opname == "STORE_ATTR")
    return tuple(names)


class ObjectKind:
    """A class whose objects are written field by field."""

    def __init__(self, kind: type, given: str | None):
        """given: a field that the reader is given, and that is not written."""
        self.kind, self.given = kind, given
        self.fields = tuple(name for name in fields_of(kind) if name != given)
        self.place = {name: i for i, name in enumerate(self.fields)}
        single = attrgetter(*self.fields) if len(self.fields) > 1 else None
        self.values: Callable[[Any], Sequence[Any]] = single or self._one_by_one

    def _one_by_one(self, thing: Any) -> Sequence[Any]:
        return [getattr(thing, name, MISSING) for name in self.fields]

    def read(self, thing: Any) -> Sequence[Any]:
        """Return the values of the fields."""
        try:
            return self.values(thing)
        except AttributeError:
            return self._one_by_one(thing)


class Kinds:
    """The classes that a graph may consist of."""

    def __init__(self) -> None:
        self.objects: list[ObjectKind] = []
        self.messages: list[type] = []
        self.rows: list[type] = [tuple, frozenset]
        self.constants: dict[str, Any] = {"missing": MISSING}  # by names
        self.methods: list[tuple[type, str]] = []

    def add_objects(self, *classes: type, given: str | None = None) -> None:
        """Add classes whose objects can refer to others, and be referred to."""
        self.objects += [ObjectKind(each, given) for each in classes]
        self.__dict__.pop("schema", None)

    @cached_property
    def schema(self) -> bytes:
        """Digest of the classes and their fields: graphs of other versions have another one."""
        told = [
            [each.__name__ for each in CONTAINERS],
            [(each.kind.__name__, each.fields) for each in self.objects],
            [(each.__name__, sorted(getattr(each, "__annotations__", {}).items())) for each in self.messages],
            [(each.__name__, getattr(each, "_fields", ())) for each in self.rows],
            [*self.constants],
            [(owner.__name__, name) for owner, name in self.methods],
        ]
        return blake2b(repr(told).encode(), digest_size=SCHEMA_BYTES).digest()


class GraphWriter:
    def __init__(
        self,
        kinds: Kinds,
        stands_for: dict[type, Callable[[Any], Any]],
        changes: dict[type, Callable[[Any], dict[str, Any]]],
    ):
        """stands_for: returns what is written instead of an object of a class. changes: returns the fields of an object
        that are written with other values."""
        self._stands_for, self._changes, self._schema = stands_for, changes, kinds.schema
        self._refs: dict[int, Any] = {id(one): Constant(i) for i, one in enumerate(kinds.constants.values())}
        self._methods = {(owner, name): i for i, (owner, name) in enumerate(kinds.methods)}
        self._rows = {each: i for i, each in enumerate(kinds.rows)}
        self._things: list[tuple[int, Any, Any]] = []  # kind, what is written, and the object itself, by node
        self._kinds: dict[type, int] = {}
        for i, each in enumerate([*CONTAINERS, *kinds.messages, *[one.kind for one in kinds.objects]]):
            self._kinds[each] = i
        self._objects, self._first_object = kinds.objects, len(CONTAINERS) + len(kinds.messages)

    def write(self, *roots: Any) -> bytes:
        """Return these objects and all that they refer to. Raises TypeError for one of an unknown class."""
        values, nodes, done = [self.value(root) for root in roots], [], 0
        while done < len(self._things):
            kind, written, _ = self._things[done]
            nodes.append((kind, self._content(kind, written)))
            done += 1
        try:
            return self._schema + ENCODER.encode((values, nodes))
        except OverflowError:
            nodes = [(kind, _with_long_ints(content)) for kind, content in nodes]
            return self._schema + ENCODER.encode((_with_long_ints(values), nodes))

    def _content(self, kind: int, thing: Any) -> Any:
        if kind < len(CONTAINERS):
            return self._items(kind, thing)
        if kind < self._first_object:
            return thing  # a message
        told = self._objects[kind - self._first_object]
        values = told.read(thing)
        if (change := self._changes.get(told.kind)) is not None:
            values = list(values)
            for name, value in change(thing).items():
                values[told.place[name]] = value
        value = self.value
        return [one if type(one) in LEAVES else value(one) for one in values]

    def _items(self, kind: int, thing: Any) -> Any:
        value = self.value
        items: list[Any] = []
        if isinstance(thing, dict):
            for pair in thing.items():
                items += pair
            if kind == CONTAINERS.index(defaultdict):
                items.insert(0, thing.default_factory)  # type: ignore[attr-defined]
        else:
            items = thing if kind == 0 else list(thing)
        if LEAVES.issuperset(map(type, items)):
            return items
        return [one if type(one) in LEAVES else value(one) for one in items]

    def value(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in LEAVES or kind in WRITTEN:
            return thing
        if (found := self._refs.get(id(thing))) is not None:
            return found
        if (row := self._rows.get(kind)) is not None:
            return Row(row, [one if type(one) in LEAVES else self.value(one) for one in thing])
        if kind is MethodType:
            owner = self.value(thing.__self__)
            return Method(owner.node, self._methods[type(thing.__self__), thing.__name__])
        written = thing
        if (stand_in := self._stands_for.get(kind)) is not None:
            written = stand_in(thing)
            if (constant := self._refs.get(id(written))) is not None and type(constant) is Constant:
                return constant
        if (number := self._kinds.get(type(written))) is None:
            raise TypeError(f"{type(written).__module__}.{type(written).__qualname__} is no part of a tape's state")
        found = self._refs[id(thing)] = Ref(len(self._things))
        self._things.append((number, written, thing))  # both live as long as their ids count
        return found


def _with_long_ints(value: Any) -> Any:
    """Return what is to be written, with each integer in a form that can be."""
    kind = type(value)
    if kind is int:
        return value if -(2**63) <= value < 2**64 else LongInt(f"{value:x}")
    if kind is list:
        return [_with_long_ints(one) for one in value]
    return Row(value.kind, _with_long_ints(value.items)) if kind is Row else value


class GraphReader:
    def __init__(self, kinds: Kinds, given: Any):
        """given: value of the fields that are not written."""
        self._kinds, self._given = kinds, given
        self._things: list[Any] = []
        self._constants = [*kinds.constants.values()]
        self._num_zeros = 0

    def read(self, data: bytes) -> list[Any]:
        """Return what was given to GraphWriter.write. Raises UnknownState."""
        if data[:SCHEMA_BYTES] != self._kinds.schema:
            raise UnknownState("another version has written it, whose scheduler consists of other parts")
        try:
            return self._read(GRAPH.decode(memoryview(data)[SCHEMA_BYTES:]))
        except UnknownState:
            raise
        except Exception as error:  # a message of a class may refuse its fields in any way, as a hash its parts
            raise UnknownState(f"{type(error).__name__}: {error}") from error

    def _read(self, graph: ObjectGraph) -> list[Any]:
        filled: list[tuple[Any, ObjectKind, list[Any]]] = []
        containers: list[tuple[Any, list[Any]]] = []
        messages, objects, thing = self._kinds.messages, self._kinds.objects, None
        for node in graph.nodes:
            if node.kind < 0:
                raise UnknownState(f"{node.kind} is no kind")
            if (number := node.kind - len(CONTAINERS)) < 0:
                thing = CONTAINERS[node.kind]()
                containers.append((thing, VALUES.decode(node.content)))
            elif number < len(messages):
                thing = msgspec.msgpack.decode(node.content, type=messages[number])
            else:
                told = objects[number - len(messages)]
                thing = object.__new__(told.kind)
                filled.append((thing, told, VALUES.decode(node.content)))
            self._things.append(thing)
        for thing, told, values in filled:
            for name, value in zip(told.fields, map(self._made, values), strict=True):
                if value is not MISSING:
                    object.__setattr__(thing, name, value)
            if told.given is not None:
                object.__setattr__(thing, told.given, self._given)
        for thing, values in containers:  # now that keys can be hashed
            self._fill(thing, values)
        return [self._made(root) for root in graph.roots]

    def _fill(self, thing: Any, values: list[Any]) -> None:
        items = values if LEAVES.issuperset(map(type, values)) else [self._made(value) for value in values]
        if isinstance(thing, defaultdict):
            thing.default_factory, *items = items
            if not isinstance(thing.default_factory, type):
                raise UnknownState("a factory is no class")
        if isinstance(thing, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                thing[key] = value
        elif isinstance(thing, set):
            thing.update(items)
        else:
            thing.extend(items)

    def _made(self, value: Any) -> Any:
        if type(value) in LEAVES:
            return value
        tag = value[0]
        if tag == 0 and len(value) == 2:  # a Ref: most are
            return self._thing(value[1])
        return self._other(msgspec.convert(value, OTHERS[tag]))

    def _other(self, value: Any) -> Any:
        kind = type(value)
        if kind is Row:
            items, row = map(self._made, value.items), self._kinds.rows[value.kind]
            return row(*items) if hasattr(row, "_fields") else row(items)
        if kind is Zeros:
            return self._zeros(value)
        if kind is LongInt:
            return int(value.digits, 16)
        if value.number < 0:
            raise UnknownState(f"{value.number} is no number")
        if kind is Constant:
            return self._constants[value.number]
        owner, name = self._kinds.methods[value.number]
        thing = self._thing(value.node)
        if type(thing) is not owner:
            raise UnknownState(f"{type(thing).__name__} has no {name}")
        return MethodType(getattr(owner, name), thing)

    def _thing(self, number: int) -> Any:
        if not 0 <= number < len(self._things):
            raise UnknownState(f"there is no node {number}")
        return self._things[number]

    def _zeros(self, zeros: Zeros) -> Any:
        self._num_zeros += zeros.count
        if zeros.count < 0 or self._num_zeros > MAX_ZEROS:
            raise UnknownState(f"more than {MAX_ZEROS} tokens")
        return array("I", bytes(4 * zeros.count)) if zeros.packed else [0] * zeros.count


def with_changed_hashes(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a graph in which all bytes that can be hashes are replaced."""
    graph, known = ANY_GRAPH.decode(memoryview(data)[SCHEMA_BYTES:]), dict[bytes, bytes]()

    def changed(value: Any) -> Any:
        kind = type(value)
        if kind is bytes:
            if not value or len(value) % BLOCK_HASH_BYTES:
                return value
            if (found := known.get(value)) is None:
                found = known[value] = change(value)
            return found
        if kind is list:
            return [one if type(one) is int else changed(one) for one in value]
        if kind is dict:
            return {changed(key): changed(one) for key, one in value.items()}
        return value

    nodes: Iterable[Any] = [(node.kind, changed(node.content)) for node in graph.nodes]
    return data[:SCHEMA_BYTES] + ENCODER.encode((changed(graph.roots), nodes))
