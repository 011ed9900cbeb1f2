"""Schemas of custom resources, by which a test validates objects as an API server would, without one.

`python -m tests.k8s.crds CRD.yaml...` writes what of a CustomResourceDefinition is kept here: the served version v1,
without descriptions. CEL rules are not evaluated. README.md has the sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parent
DROPPED = ("description", "default", "example", "format", "x-kubernetes-validations")


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return what the schema of a custom resource refuses. Raises KeyError for a kind that is not here."""
    validator = _validators()[manifest["apiVersion"], manifest["kind"]]
    found = validator.iter_errors(_without_nulls(manifest))
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message[:160]}" for error in found)


def kinds() -> set[tuple[str, str]]:
    """The apiVersion and kind of each schema."""
    return set(_validators())


def reduced(crd: dict[str, Any]) -> dict[str, Any]:
    """Keep of a CRD what `errors` reads. Raises StopIteration if it does not serve v1."""
    version = next(v for v in crd["spec"]["versions"] if v["served"] and v["name"] == "v1")
    schema = _without_descriptions(version["schema"]["openAPIV3Schema"])
    return {"group": crd["spec"]["group"], "kind": crd["spec"]["names"]["kind"], "schema": schema}


@cache
def _validators() -> dict[tuple[str, str], Any]:
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        crd = json.loads(file.read_text())
        schema = _closed(crd["schema"])
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        found[f"{crd['group']}/v1", crd["kind"]] = Validator(schema)
    return found


def _closed(schema: Any) -> Any:
    """Translate a structural schema of Kubernetes into JSON Schema, in which unknown fields are errors."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties", {})
    closed = {key: _closed(value) for key, value in schema.items() if key not in DROPPED and key != "properties"}
    if properties:
        closed["properties"] = {name: _closed(value) for name, value in properties.items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
    if "required" in closed:  # a server fills in defaults before it looks for what is required
        closed["required"] = [name for name in schema["required"] if "default" not in properties.get(name, {})]
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
        closed["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return closed


def _unique(validator: Any, kind: str, instance: Any, schema: dict[str, Any]) -> Iterator[jsonschema.ValidationError]:
    """Refuse two items of a list of type `set` or `map` that have the same key."""
    if kind not in ("set", "map") or not isinstance(instance, list):
        return
    names = schema.get("x-kubernetes-list-map-keys", [])
    keys = [repr([item.get(name) for name in names] if kind == "map" else item) for item in instance]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        yield jsonschema.ValidationError(f"{key} is there twice")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-kubernetes-list-type": _unique})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _without_descriptions(schema: Any, *, of_properties: bool = False) -> Any:
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if of_properties or key != "description"}
        return {
            key: _without_descriptions(value, of_properties=key == "properties" and not of_properties)
            for key, value in kept.items()
        }
    return [_without_descriptions(item) for item in schema] if isinstance(schema, list) else schema
