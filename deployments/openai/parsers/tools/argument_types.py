"""Converts arguments that a model writes as plain text to JSON, by the types that their schema allows."""

from __future__ import annotations

import ast
import json
from typing import Any

import msgspec

from engine.grammars.references import target_of

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def argument_types(schema: dict[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the arguments' schema allows for one argument; `string` if the schema names none."""
    root: Any = schema
    if "properties" not in schema and isinstance(reference := schema.get("$ref"), str):
        root = target_of(reference, schema)
    properties = root.get("properties") if isinstance(root, dict) else None
    found = _types(properties.get(key) if isinstance(properties, dict) else None, schema, depth=0)
    return frozenset(found or {"string"})


def json_value(text: str, types: frozenset[str]) -> str:
    """Return `text` as JSON of the first of these types that fits it, or as a JSON string if none fits. types: empty
    for any type."""
    lowered = text.strip().lower()
    if (lowered in ("true", "false") and "boolean" in types) or (lowered == "null" and "null" in types):
        return lowered  # accepts Python's True too
    for candidate in (text.strip(), _python_literal(text) if types & {"array", "object"} else ""):
        try:
            kind = _kind(msgspec.json.decode(candidate))
        except (ValueError, RecursionError):
            continue
        if not types or "string" not in types or kind in types or (kind == "integer" and "number" in types):
            return candidate
    return json.dumps(text, ensure_ascii=False)


def _python_literal(text: str) -> str:
    """Return the JSON of a list or dictionary in Python's syntax, which some chat templates show to models; "" for
    other text."""
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ""


def _kind(value: object) -> str:
    return _NAMES.get(type(value), "null")


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    found = schema.get("type", [])
    types = {found} if isinstance(found, str) else {name for name in found if isinstance(name, str)}
    values = schema.get("enum", []) if isinstance(schema.get("enum", []), list) else []
    types |= {_kind(value) for value in [*values, *([schema["const"]] if "const" in schema else [])]}
    for word in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(word) or []:
            types |= _types(branch, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        types |= _types(target_of(reference, root), root, depth + 1)
    return types
