"""Which types of JSON values a schema allows, and which of them a keyword concerns."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ALL_TYPES = frozenset(TYPES) - {"integer"}  # integers are numbers
_STRING = ("minLength", "maxLength", "pattern", "format")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"),
    *("uniqueItems", "contains", "minContains", "maxContains"),
)
_OBJECT = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
CONCERNS = {
    keyword: kind
    for kind, keywords in {"string": _STRING, "number": _NUMBER, "array": _ARRAY, "object": _OBJECT}.items()
    for keyword in keywords
}
"""The type to whose values alone a keyword applies; others apply to all."""


def possible_types(schema: Any) -> frozenset[str]:
    """Return the types that `type`, `const`, `enum`, `anyOf` and `oneOf` leave, with `integer` only if other numbers
    are excluded."""
    if not isinstance(schema, dict):
        return ALL_TYPES if schema else frozenset()
    found = ALL_TYPES
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else as_names(schema["type"])
        found = frozenset(names) - ({"integer"} if "number" in names else frozenset())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = _both(frozenset(map(type_of, values)), found)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            found = _both(found, frozenset().union(*map(possible_types, branches)))
    return found


def concerns(keyword: str, types: frozenset[str]) -> bool:
    """Return whether a keyword applies to any value of these types."""
    kind = CONCERNS.get(keyword)
    return kind is None or kind in types or (kind == "number" and "integer" in types)


def type_of(value: Any) -> str:
    """Return a value's type; `integer` for a whole number, however it is written."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if isinstance(value, int) or value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def are_disjoint(a: Any, b: Any) -> bool:
    """Return whether it is certain that no value is valid in both of two schemas, in which references are resolved."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    if not overlap(possible_types(a), possible_types(b)):
        return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return not values & others
    if possible_types(a) != {"object"} or possible_types(b) != {"object"}:
        return False
    required = [*as_names(a.get("required")), *as_names(b.get("required"))]
    return any(are_disjoint(_property(a, name), _property(b, name)) for name in required)


def as_names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def overlap(types: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether a value may have one of `types` and one of `others`."""
    return bool(_both(types, others))


def difference(types: frozenset[str], excluded: Collection[str]) -> list[str] | None:
    """Return `types` without others; None if the rest cannot be named, as numbers that are no integers cannot."""
    if "integer" in excluded and "number" not in excluded and "number" in types:
        return None
    return [name for name in TYPES if name in types and not _common(name, frozenset(excluded))]


def _both(types: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    return frozenset(_common(kind, others) for kind in types) - {""}


def _common(kind: str, types: frozenset[str]) -> str:
    """Return what a type and these types have in common; "" for nothing."""
    if kind in types or (kind == "integer" and "number" in types):
        return kind
    return "integer" if kind == "number" and "integer" in types else ""


def _values(schema: dict[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(int(x) if type_of(x) == "integer" else x, sort_keys=True) for x in values}


def _property(schema: dict[str, Any], name: str) -> Any:
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
