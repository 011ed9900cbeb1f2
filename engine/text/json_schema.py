"""Adapts JSON schemas to llguidance, which refuses any `format` that it does not know. pydantic writes many such
formats."""

from __future__ import annotations

from typing import Any

# Formats that pydantic writes for Python types. JSON Schema does not define them, so they allow any string.
ANNOTATIONS = frozenset(
    [
        "base64",
        "base64url",
        "binary",
        "byte",
        "color",
        "decimal",
        "directory-path",
        "file-path",
        "ipv4interface",
        "ipv4network",
        "ipv6interface",
        "ipv6network",
        "ipvanyaddress",
        "ipvanyinterface",
        "ipvanynetwork",
        "json-string",
        "multi-host-uri",
        "password",
        "path",
        "phone",
        "regex",
    ]
)
UUIDS = frozenset(f"uuid{version}" for version in range(1, 9))
_VALUES = ("const", "default", "enum", "example", "examples")  # no schemas inside
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")  # schemas by names


def without_annotations(schema: Any) -> Any:
    """Return the schema without formats that allow any string, and with `uuid` in place of `uuid1` to `uuid8`."""
    if isinstance(schema, list):
        return [without_annotations(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _VALUES:
            kept[key] = value
        elif key in _NAMED and isinstance(value, dict):
            kept[key] = {name: without_annotations(entry) for name, entry in value.items()}
        elif key == "format" and isinstance(value, str) and value in UUIDS:
            kept[key] = "uuid"
        elif key != "format" or not isinstance(value, str) or value not in ANNOTATIONS:
            kept[key] = without_annotations(value)
    return kept
