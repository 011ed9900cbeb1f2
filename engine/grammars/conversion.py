"""The keywords of one JSON schema, each written with those that llguidance knows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from engine.grammars.closing import CHOICES
from engine.grammars.references import Subschema
from engine.grammars.value_types import ALL_TYPES, as_names, concerns, difference, overlap, possible_types, type_of

FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)  # that llguidance enforces; by JSON Schema's rules any other asserts nothing
UUIDS = frozenset(f"uuid{version}" for version in range(1, 9))  # that pydantic writes
MAX_BOUND = 10**18  # of numbers, in llguidance; a bound further out becomes this one
MAX_LENGTH = 2**31 - 1  # that an answer may have; longer ones are no limits
MAX_DEPENDENCIES = 4  # of which each doubles the alternatives
Schema = dict[str, Any] | bool
Close = dict[str, Callable[[Subschema, Any], Schema]]


class SubschemaConverter(Protocol):
    """What converts the schemas inside a schema."""

    def start(self, place: Subschema) -> Schema:
        """Return a schema that is no part of another one's conditions on the same value."""
        ...

    def part(self, place: Subschema) -> Schema:
        """Return a schema that is one of several conditions on a value, so that its object is as open as it says."""
        ...

    def reference(self, place: Subschema, keyword: str) -> Schema:
        """Return the schema to which a keyword refers, as one of several conditions."""
        ...

    def resolved(self, schema: Schema) -> Schema:
        """Return the schema to which a reference of the converted document leads."""
        ...

    def exclude_each_other(self, branches: list[Schema], others: list[Schema]) -> bool:
        """Return whether it is certain that no value is valid in a branch and in another one of `others`."""
        ...


class Conversion:
    """One schema while it is converted."""

    def __init__(self, parts: SubschemaConverter, place: Subschema, types: frozenset[str], close: Close):
        """types: types of the values that it allows. close: for keywords whose branches are to be closed, what converts
        a branch."""
        self._parts, self._place, self._types, self._close = parts, place, types, close
        self._keywords = place.keywords
        self._out: dict[str, Any] = {}
        self._more: list[dict[str, Any]] = []  #: further schemas that must hold
        self._impossible = not types

    def result(self) -> Schema:
        """Raises SchemaError."""
        for keyword in self._keywords:
            handler = HANDLERS.get(keyword)
            if handler is not None and concerns(keyword, self._types):
                handler(self, keyword)
        out = self._out
        if self._impossible:
            return False
        if len(self._more) == 1 and out.keys() <= {"type", "allOf"}:
            only = self._parts.resolved(self._more[0])
            if "type" not in out or (isinstance(only, dict) and only.get("type") == out["type"]):
                return self._more[0]
        return out or True

    # -- any value ---------------------------------------------------------------------------------------------

    def copy(self, keyword: str) -> None:
        self._out[keyword] = self._keywords[keyword]

    def enum(self, keyword: str) -> None:
        self._impossible |= not self._keywords[keyword]
        self.copy(keyword)

    def all_of(self, keyword: str) -> None:
        branches = [self._branch(keyword, index, branch) for index, branch in self._place.children(keyword)]
        for branch in branches:
            self._require(branch)

    def any_of(self, keyword: str) -> None:
        self._choose([self._branch(keyword, index, branch) for index, branch in self._place.children(keyword)])

    def one_of(self, keyword: str) -> None:
        branches = [self._branch(keyword, index, branch) for index, branch in self._place.children(keyword)]
        possible: list[Schema] = [branch for branch in branches if branch is not False]
        if len(possible) < 2 or keyword in self._close or self._parts.exclude_each_other(possible, possible):
            self._choose(possible)
        elif possible.count(True) > 1:
            self._impossible = True
        else:  # llguidance decides
            self._require({"oneOf": possible})

    def negate(self, keyword: str) -> None:
        inner = self._place.child(keyword)
        if isinstance(inner.schema, dict) and inner.keywords.keys() & HANDLERS.keys() == {"not"}:
            self._require(self._parts.part(inner.child("not")))
            return
        refuted = self._resolved(keyword)
        if refuted is True:
            self._impossible = True
        elif isinstance(refuted, dict) and overlap(possible_types(refuted), self._types):
            others = difference(self._types, possible_types(refuted)) if refuted.keys() == {"type"} else None
            if others is None:
                raise self._place.refused("not")
            self._require({"type": others} if others else False)

    def condition(self, keyword: str) -> None:
        branches = {key: self._parts.part(self._place.child(key)) for key in ("then", "else") if key in self._keywords}
        if any(branch is not True for branch in branches.values()):
            test = self._parts.resolved(self._parts.part(self._place.child(keyword)))
            if not isinstance(test, bool):
                raise self._place.refused(keyword)
            self._require(branches.get("then" if test else "else", True))

    def reference(self, keyword: str) -> None:
        if keyword in self._close:
            self._require(self._close[keyword](self._place.target(keyword), None))
        else:
            self._require(self._parts.reference(self._place, keyword))

    # -- texts and numbers -------------------------------------------------------------------------------------

    def format(self, keyword: str) -> None:
        name = self._keywords[keyword]
        name = "uuid" if isinstance(name, str) and name in UUIDS else name
        if isinstance(name, str) and name in FORMATS:
            self._out[keyword] = name

    def bound(self, keyword: str) -> None:
        value, sign = self._keywords[keyword], 1 if keyword.endswith("aximum") else -1
        if isinstance(value, bool) or not isinstance(value, int | float) or sign * value <= MAX_BOUND:
            if value is not False:  # in draft 4, exclusiveMinimum is true or false
                self.copy(keyword)
        elif abs(value) < sys.float_info.max:
            self._out[keyword] = sign * MAX_BOUND

    def limit(self, keyword: str) -> None:
        number = self._whole(keyword)
        always = len(set(as_names(self._keywords.get("required")))) if keyword == "minProperties" else 0
        if number <= MAX_LENGTH if keyword.startswith("max") else number > always:
            self._out[keyword] = number

    # -- arrays ------------------------------------------------------------------------------------------------

    def items(self, keyword: str) -> None:
        if isinstance(self._keywords[keyword], list):  # in drafts before 2020-12
            self._out["prefixItems"] = self._list(keyword)
            if "additionalItems" in self._keywords:
                self._set("items", self._parts.start(self._place.child("additionalItems")))
        else:
            self._set("items", self._parts.start(self._place.child(keyword)))

    def prefix_items(self, keyword: str) -> None:
        if not isinstance(self._keywords.get("items"), list):
            self._out[keyword] = self._list(keyword)

    def unique_items(self, keyword: str) -> None:
        if self._keywords[keyword] is not False and not ("maxItems" in self._keywords and self._whole("maxItems") < 2):
            raise self._place.refused(keyword)

    def contains(self, keyword: str) -> None:
        low = self._whole("minContains") if "minContains" in self._keywords else 1
        high = self._whole("maxContains") if "maxContains" in self._keywords else None
        item = self._parts.resolved(self._parts.part(self._place.child(keyword))) if low or high is not None else True
        if item is False:
            self._require({"type": difference(ALL_TYPES, {"array"})} if low else True)
        elif item is True:
            self._require(
                {**({"minItems": low} if low else {}), **({} if high is None else {"maxItems": high})} or True
            )
        else:
            raise self._place.refused(keyword)

    def unevaluated_items(self, keyword: str) -> None:
        rest = self._parts.start(self._place.child(keyword))
        known = isinstance(self._keywords.get("items"), dict | bool) or "additionalItems" in self._keywords
        if rest is True or known:
            return
        if self._keywords.keys() & {*CHOICES, "allOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "contains"}:
            raise self._place.refused(keyword, "cannot be enforced beside keywords with schemas for the same array")
        self._out["items"] = rest

    # -- objects -----------------------------------------------------------------------------------------------

    def properties(self, keyword: str) -> None:
        self._out[keyword] = self._object(keyword)

    def patterns(self, keyword: str) -> None:
        found = self._object(keyword)
        if "additionalProperties" not in self._keywords:
            found = {pattern: schema for pattern, schema in found.items() if schema is not True}
        if found:
            self._out[keyword] = found

    def additional(self, keyword: str) -> None:
        self._set(keyword, self._parts.start(self._place.child(keyword)))

    def required(self, keyword: str) -> None:
        self._out[keyword] = self._names(self._keywords[keyword], keyword)

    def property_names(self, keyword: str) -> None:
        names = self._of_texts(self._resolved(keyword))
        if isinstance(names, bool):
            self._require(names or {"maxProperties": 0})
            return
        values = [names["const"]] if "const" in names else names.get("enum")
        rest = names.keys() - {"const", "enum"}
        if values is not None and not rest:
            self._require({"properties": dict.fromkeys(as_names(values), True), "additionalProperties": False})
        elif rest == {"pattern"} and values is None:
            self._require({"patternProperties": {names["pattern"]: True}, "additionalProperties": False})
        elif rest <= {"minLength", "maxLength"} and values is None:
            pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            self._require({"patternProperties": {pattern: True}, "additionalProperties": False})
        else:
            raise self._place.refused(keyword)

    def _of_texts(self, schema: Schema) -> Schema:
        """Return what a converted schema asserts of texts."""
        found = self._parts.resolved(schema)
        if isinstance(found, bool) or "string" not in possible_types(found):
            return found is True
        kept = {key: value for key, value in found.items() if key != "type" and concerns(key, frozenset({"string"}))}
        if "anyOf" in kept and any(self._of_texts(branch) is True for branch in kept["anyOf"]):
            del kept["anyOf"]
        return kept or True

    def dependencies(self, keyword: str) -> None:
        given = self._keywords[keyword]
        if not isinstance(given, dict):
            raise self._place.error("an object", keyword)
        needed: dict[str, Schema] = {}
        for name, value in given.items():
            if isinstance(value, list):
                schema: Schema = {"required": self._names(value, keyword, name)} if value else True
            else:
                schema = self._parts.part(self._place.child(keyword, name))
            if schema is not True:
                needed[name] = schema
        if len(needed) > MAX_DEPENDENCIES:
            raise self._place.refused(keyword, f"cannot be enforced for more than {MAX_DEPENDENCIES} properties")
        for name, schema in needed.items():
            absent = {"properties": {name: False}}
            if schema is False:
                self._require(absent)
            elif isinstance(schema, dict):
                present = {"type": "object", "required": [name], "allOf": [schema]}
                others = {"type": difference(ALL_TYPES, {"object"})}
                self._require({"anyOf": [{"type": "object", **absent}, present, others]})

    # -- parts -------------------------------------------------------------------------------------------------

    def _branch(self, keyword: str, index: Any, branch: Subschema) -> Schema:
        return self._close[keyword](branch, index) if keyword in self._close else self._parts.part(branch)

    def _resolved(self, keyword: str) -> Schema:
        return self._parts.resolved(self._parts.part(self._place.child(keyword)))

    def _require(self, schema: Schema) -> None:
        if schema is False:
            self._impossible = True
        elif schema is not True:
            self._out.setdefault("allOf", self._more)  # llguidance writes properties in the order of the keywords
            self._more.append(schema)

    def _choose(self, branches: list[Schema]) -> None:
        possible = [branch for branch in branches if branch is not False]
        if len(possible) < 2:
            self._require(possible[0] if possible else False)
        elif True not in possible:
            self._require({"anyOf": possible})

    def _set(self, keyword: str, schema: Schema) -> None:
        if schema is not True:
            self._out[keyword] = schema

    def _list(self, keyword: str) -> list[Schema]:
        if not isinstance(self._keywords[keyword], list):
            raise self._place.error("a list of schemas", keyword)
        return [self._parts.start(child) for _, child in self._place.children(keyword)]

    def _object(self, keyword: str) -> dict[str, Schema]:
        if not isinstance(self._keywords[keyword], dict):
            raise self._place.error("an object of schemas", keyword)
        return {name: self._parts.start(child) for name, child in self._place.children(keyword)}

    def _names(self, value: Any, *path: str) -> list[str]:
        if not isinstance(value, list) or len(as_names(value)) < len(value):
            raise self._place.error("a list of names", *path)
        return value

    def _whole(self, keyword: str) -> int:
        value = self._keywords[keyword]
        if isinstance(value, bool) or type_of(value) != "integer" or value < 0:
            raise self._place.error("a whole number of at least 0", keyword)
        return int(value)


HANDLERS: dict[str, Callable[[Conversion, str], None]] = {
    **dict.fromkeys(("type", "const", "pattern", "multipleOf"), Conversion.copy),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), Conversion.bound),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), Conversion.limit
    ),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), Conversion.dependencies),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), Conversion.reference),
    "enum": Conversion.enum,
    "allOf": Conversion.all_of,
    "anyOf": Conversion.any_of,
    "oneOf": Conversion.one_of,
    "not": Conversion.negate,
    "if": Conversion.condition,
    "format": Conversion.format,
    "items": Conversion.items,
    "prefixItems": Conversion.prefix_items,
    "uniqueItems": Conversion.unique_items,
    "contains": Conversion.contains,
    "unevaluatedItems": Conversion.unevaluated_items,
    "properties": Conversion.properties,
    "patternProperties": Conversion.patterns,
    "additionalProperties": Conversion.additional,
    "required": Conversion.required,
    "propertyNames": Conversion.property_names,
}
"""How each keyword that asserts something is converted. All others are annotations, or belong to one of these."""
