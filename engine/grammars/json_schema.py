"""JSON schemas in the form that llguidance enforces.

llguidance knows some keywords and refuses all others of JSON Schema. Here each keyword is left out if it is an
annotation, or if it asserts nothing about the values that can occur; is written with keywords that llguidance knows; or
is refused by name. References are resolved, so that a schema keeps its meaning inside a larger one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from engine.grammars.closing import CHOICES, NO_NAMES, OF_NAMES, Names, Walk, closed_to, declared_names, has_choices
from engine.grammars.conversion import HANDLERS, Close, Conversion, Schema
from engine.grammars.references import SchemaError, Subschema, is_ambiguous
from engine.grammars.value_types import TYPES, are_disjoint, concerns, possible_types

# At most one space, or a line break with its indentation, as in llama.cpp: a weak model that may write any number of
# blanks between two tokens of JSON would write nothing else.
WHITESPACE = "( |\n[ \t]{0,20})?"
CACHED_RESULTS = 256  # agents send the same tools with each turn
MAX_CACHED_CHARS = 20_000
T = TypeVar("T")
MAX_STEPS = 20_000  # schemas visited for one document; those behind a reference or in several groups count again


def enforceable(schema: dict[str, Any], *, closed: bool) -> str:
    """Return a schema as llguidance reads it, as JSON. Raises SchemaError. closed: as in SchemaBuilder."""
    return cached(_enforceable, json.dumps(schema), closed)


def cached(function: Callable[..., T], text: str, *more: Hashable) -> T:
    """Return the result of a function with a cache, which keeps no results of long texts."""
    return (function if len(text) <= MAX_CACHED_CHARS else inspect.unwrap(function))(text, *more)


@lru_cache(CACHED_RESULTS)
def _enforceable(text: str, closed: bool) -> str:
    builder = SchemaBuilder(closed=closed)
    return builder.document(builder.add(json.loads(text)))


class SchemaBuilder:
    """Converts schemas, which may then be parts of one document."""

    def __init__(self, *, closed: bool):
        """closed: whether an object whose schema lists properties, and says nothing of others, may have no others."""
        self._closed = closed
        self._defs: dict[str, Any] = {}
        self._names: dict[tuple[int, bool], str] = {}
        self._roots: list[Any] = []  # keeps schemas alive, so that their ids stay theirs
        self._root: dict[str, Any] = {}
        self._walk = Walk(MAX_STEPS)

    def add(self, schema: dict[str, Any]) -> Schema:
        """Return the schema in a form that `document` completes. Raises SchemaError."""
        self._roots.append(schema)
        self._root, self._walk = schema, Walk(MAX_STEPS)
        try:
            return self.start(Subschema.root(schema))
        except RecursionError:
            raise SchemaError("it is nested too deeply") from None

    def document(self, schema: Schema) -> str:
        """Return a schema that consists of what `add` returned, as JSON. Raises SchemaError."""
        if schema is False:
            raise SchemaError("no value is valid")
        found = {} if schema is True else schema
        defs = self._referred(found)
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return json.dumps({**found, **({"$defs": defs} if defs else {}), **options})

    def _referred(self, schema: Any) -> dict[str, Any]:
        """Return the definitions to which a schema refers, those to which they refer included."""
        found: dict[str, Any] = {}
        waiting = [schema]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.values()
                name = str(value.get("$ref")).removeprefix("#/$defs/")
                if name in self._defs and name not in found:
                    found[name] = self._defs[name]
                    waiting.append(found[name])
            elif isinstance(value, list):
                waiting += value
        return found

    def resolved(self, schema: Schema) -> Schema:
        """See SubschemaConverter."""
        while isinstance(schema, dict) and schema.keys() == {"$ref"}:
            name = schema["$ref"].removeprefix("#/$defs/")
            if name not in self._defs:  # still being converted
                break
            schema = self._defs[name]
        return schema

    def start(self, place: Subschema) -> Schema:
        """See SubschemaConverter."""
        keywords = place.keywords
        conditions = {key for key in keywords if key in HANDLERS}
        if conditions == {"$ref"}:
            return self._define(place.target("$ref"), outermost=True)
        if conditions == {"allOf"} and isinstance(keywords["allOf"], list) and len(keywords["allOf"]) == 1:
            return self.start(place.child("allOf", 0))
        if self._closed and "unevaluatedProperties" not in keywords and not keywords.keys().isdisjoint(OF_NAMES):
            names = declared_names(place, self._walk)
            least = keywords.get("minProperties", 0)
            if names.declared and not (isinstance(least, int) and least > len(names) and not names.patterns):
                return self._close(place, NO_NAMES, False)
        return self._open(place, {})

    def _close(self, place: Subschema, outer: Names, rest: Schema, *, exact: bool = False) -> Schema:
        """Return the schema of an object that has no other properties than those named in it or in `outer`, or only
        others that are valid in `rest`.

        If branches name different properties, each is closed by itself: a value has only those of one branch, even if
        it is valid in several. exact: whether it may have those of all then, as with `unevaluatedProperties`.
        """
        self._walk.step()
        keywords = place.keywords
        branching = [
            key for key in (*CHOICES, "allOf", "$ref") if key in keywords and has_choices(place, key, self._walk)
        ]
        if (outer | declared_names(place, self._walk, without=branching)).all:
            return self.part(place)
        names = outer | declared_names(place, self._walk)
        if exact and names.conditional:
            raise place.refused("unevaluatedProperties", "cannot be enforced beside conditions")
        close: Close = {key: partial(self._close_branch, place, key, outer, rest, exact) for key in branching}
        for key in CHOICES:
            if key in close and (exact or key == "oneOf") and not self._are_exclusive(place, key, close[key], exact):
                if exact:
                    raise place.refused("unevaluatedProperties", f"cannot be enforced beside this {key}")
                del close[key]
        if close or names.all:
            return self._open(place, close)
        whole = self.part(place)
        own = whole.get("patternProperties", {}) if isinstance(whole, dict) else {}
        if not exact and len(names.patterns) > 1 and names.patterns.keys() - own:
            return whole  # llguidance takes no patterns of which a name may fit several
        return closed_to(whole, replace(names, required={}) if exact else names, rest)

    def _close_branch(
        self, place: Subschema, key: str, outer: Names, rest: Schema, exact: bool, branch: Subschema, index: Any
    ) -> Schema:
        """Return a branch of `place`, closed to the names of its own and those of all but the branches beside it."""
        if key == "allOf" and not any(has_choices(branch, inner, self._walk) for inner in branch.keywords):
            return self.part(branch)
        around = outer | declared_names(place, self._walk, without=[(key, index) if key == "allOf" else key])
        if rest is False and not exact and not around:
            return self.start(branch)
        return self._close(branch, around, rest, exact=exact)

    def _are_exclusive(
        self, place: Subschema, key: str, close: Callable[[Subschema, Any], Schema], exact: bool
    ) -> bool:
        """Return whether it is certain that what is valid in a closed branch is not valid in another one as written."""
        branches = list(place.children(key))
        free = [self.part(branch) for _, branch in branches]
        closed = free if exact else [close(branch, index) for index, branch in branches]
        return self.exclude_each_other(closed, free)

    def exclude_each_other(self, branches: list[Schema], others: list[Schema]) -> bool:
        """See SubschemaConverter."""
        a, b = ([self._with_properties(schema) for schema in schemas] for schemas in (branches, others))
        return all(are_disjoint(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i != j)

    def _with_properties(self, schema: Schema) -> Schema:
        """Return a schema with the references of its properties resolved."""
        found = self.resolved(schema)
        if not isinstance(found, dict) or "properties" not in found:
            return found
        return {**found, "properties": {name: self.resolved(inner) for name, inner in found["properties"].items()}}

    def part(self, place: Subschema) -> Schema:
        """See SubschemaConverter."""
        return self._open(place, {})

    def reference(self, place: Subschema, keyword: str) -> Schema:
        """See SubschemaConverter."""
        if keyword != "$ref" and is_ambiguous(self._root, keyword):
            raise place.refused(keyword, "may have several targets")
        return self._define(place.target(keyword), outermost=False)

    def _define(self, target: Subschema, *, outermost: bool) -> Schema:
        """Return a reference to a definition of this document; what it leads to if that is simpler."""
        key = (id(target.schema), outermost)
        if not isinstance(target.schema, dict):
            return self._open(target, {})
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            converted = self.start(target) if outermost else self._open(target, {})
            if isinstance(converted, dict) and converted.get("$ref") == f"#/$defs/{name}":
                raise SchemaError(f"{target.path} refers to itself")
            self._defs[name] = converted
        found: Schema | None = self._defs.get(self._names[key])
        if isinstance(found, bool) or (found is not None and found.keys() == {"$ref"}):
            return found
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _open(self, place: Subschema, close: Close) -> Schema:
        self._walk.step()
        if isinstance(place.schema, bool):
            return place.schema
        keywords = place.keywords
        if "unevaluatedProperties" in keywords:
            rest = self.start(place.child("unevaluatedProperties"))
            if rest is not True and concerns("unevaluatedProperties", self._types(place)):
                without = {key: value for key, value in keywords.items() if key != "unevaluatedProperties"}
                self._roots.append(without)
                return self._close(replace(place, schema=without), NO_NAMES, rest, exact=True)
        return Conversion(self, place, self._types(place), close).result()

    def _types(self, place: Subschema) -> frozenset[str]:
        keywords = place.keywords
        named = keywords.get("type", [])
        names = named if isinstance(named, list) else [named]
        if ("type" in keywords and not names) or not all(isinstance(name, str) and name in TYPES for name in names):
            raise place.error(f"one or several of {', '.join(TYPES)}", "type")
        if "enum" in keywords and not isinstance(keywords["enum"], list):
            raise place.error("a list", "enum")
        return possible_types(keywords)
