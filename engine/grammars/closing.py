"""Objects without further properties: which names a schema lists, together with the schemas that apply to the same
value, and how others are excluded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from engine.grammars.references import SchemaError, Subschema
from engine.grammars.value_types import as_names

CHOICES = ("anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else", "dependentSchemas", "dependencies")
_SAME_VALUE = (*CHOICES, *_CONDITIONS, "allOf", "$ref", "$dynamicRef", "$recursiveRef")
"""Keywords whose schemas apply to the value itself, not to a part of it."""
_LISTS = ("properties", "patternProperties")
OF_NAMES = {*_SAME_VALUE, *_LISTS, "required", "additionalProperties", "unevaluatedProperties"}


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a schema lists for the properties of an object."""

    properties: dict[str, None] = field(default_factory=dict)  #: in order
    patterns: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    declared: bool = False  #: whether the schema lists properties or patterns
    all: bool = False  #: whether the schema says something of all other names
    conditional: bool = False  #: whether some are listed only under a condition other than a branch

    def __bool__(self) -> bool:
        return bool(self.properties or self.patterns or self.required or self.all)

    def __len__(self) -> int:
        return len({**self.properties, **self.required})

    def __or__(self, other: Names) -> Names:
        return Names(
            {**self.properties, **other.properties},
            {**self.patterns, **other.patterns},
            {**self.required, **other.required},
            self.declared or other.declared,
            self.all or other.all,
            self.conditional or other.conditional,
        )


NO_NAMES = Names()


class Walk:
    """What is known of the schemas of one document, and how many have been visited."""

    def __init__(self, max_steps: int):
        self.names: dict[int, Names] = {}  #: by the identity of a schema
        self._left = self._max_steps = max_steps

    def step(self) -> None:
        """Raises SchemaError."""
        self._left -= 1
        if self._left < 0:
            raise SchemaError(f"it has more than {self._max_steps} schemas, with those behind references")


def declared_names(place: Subschema, walk: Walk, *, without: Collection[str | tuple[str, int]] = ()) -> Names:
    """Return the names listed in a schema and in those that apply to the same value, always or under a condition.

    without: keywords to leave out, or pairs of a keyword and the index of a branch.
    """
    if not without and id(place.schema) in walk.names:
        return walk.names[id(place.schema)]
    walk.step()
    keywords = place.keywords
    if keywords.keys().isdisjoint(OF_NAMES):
        return NO_NAMES
    listed = {key: value for key in _LISTS if isinstance(value := keywords.get(key), dict)}
    names = Names(
        dict.fromkeys(listed.get("properties", ())),
        dict.fromkeys(listed.get("patternProperties", ())),
        dict.fromkeys(as_names(keywords.get("required"))),
        declared="properties" in listed or bool(listed.get("patternProperties")),
        all="additionalProperties" in keywords or "unevaluatedProperties" in keywords,
    )
    for key in keywords:
        if key in _SAME_VALUE and key not in without:
            for index, branch in _branches(place, key):
                if (key, index) not in without:
                    inner = declared_names(branch, walk)
                    names |= replace(inner, conditional=inner.conditional or (key in _CONDITIONS and bool(inner)))
    if not without:
        walk.names[id(place.schema)] = names
    return names


def has_choices(place: Subschema, key: str, walk: Walk) -> bool:
    """Return whether a value has different names by the branch of this keyword in which it is valid."""
    walk.step()
    if key in CHOICES:
        return any(declared_names(branch, walk) for _, branch in _branches(place, key))
    return key in ("allOf", "$ref") and any(
        inner in branch.keywords and has_choices(branch, inner, walk)
        for _, branch in _branches(place, key)
        for inner in (*CHOICES, "allOf", "$ref")
    )


def closed_to(schema: dict[str, Any] | bool, names: Names, rest: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a converted schema for objects in which other properties than those named must be valid in `rest`."""
    if schema is False:
        return False
    limit: dict[str, Any] = {
        "properties": dict.fromkeys({**names.properties, **names.required}, True),
        **({"patternProperties": dict.fromkeys(names.patterns, True)} if names.patterns else {}),
        "additionalProperties": rest,
    }
    if schema is True:
        return limit
    if schema.keys() & {*CHOICES, "allOf", "$ref", "additionalProperties"}:
        kind = {"type": "object"} if schema.get("type") == "object" else {}
        return {**schema, "allOf": [*schema.get("allOf", []), {**kind, **limit}]}
    for key in _LISTS:
        if key in limit:
            own = schema.get(key, {})
            limit[key] = {**own, **{name: True for name in limit[key] if name not in own}}
    closed = {**schema, **limit}
    if rest is False and not names.patterns and closed.get("maxProperties", 0) >= len(limit["properties"]):
        closed.pop("maxProperties", None)
    return closed


def _branches(place: Subschema, key: str) -> Iterator[tuple[int | None, Subschema]]:
    """Yield the schemas below a keyword that apply to the same value, those of a list with their index."""
    if key in ("$ref", "$dynamicRef", "$recursiveRef"):
        yield None, place.target(key)
    elif key in ("if", "then", "else"):
        yield None, place.child(key)
    else:
        for index, branch in place.children(key):
            if not isinstance(branch.schema, list):  # in `dependencies`, names
                yield (index if isinstance(index, int) else None), branch
