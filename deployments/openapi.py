"""OpenAPI document, built from the types that the routes take and return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.http.errors import AnthropicErrorBody, ErrorBody, is_anthropic
from deployments.http.route import OPEN, Route

REF = "#/components/schemas/{}"
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def openapi_document(routes: Iterable[Route], version: str, *, with_keys: bool) -> dict[str, Any]:
    """Return the document of all routes that have a summary. Takes a tenth of a second.

    with_keys: whether the routes require an API key.
    """
    listed = [route for route in routes if route.summary]
    results = dict.fromkeys([ErrorBody, AnthropicErrorBody, *(r.result for r in listed if isinstance(r.result, type))])
    result_refs, result_schemas = msgspec.json.schema_components(results, ref_template=REF.format("{name}"))
    refs = dict(zip(results, result_refs, strict=True))
    body_refs, definitions = models_json_schema(
        [(route.body, "validation") for route in listed if route.body and route.method != "GET"],
        ref_template=REF.format("{model}"),
    )
    errors = {
        anthropic: {"description": "An error.", "content": _json_content(refs[body])}
        for anthropic, body in ((False, ErrorBody), (True, AnthropicErrorBody))
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        path = route.path.replace(":path}", "}")
        operation: dict[str, Any] = {"summary": route.summary}
        operation["parameters"] = [NAME] if "{name}" in path else []
        if route.body is not None and route.method == "GET":
            operation["parameters"] += _query(route.body)
        elif route.body is not None:
            content = {route.body_type: {"schema": body_refs[route.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        ok: dict[str, Any] = {"description": "Done."}
        if isinstance(route.result, str):
            ok["content"] = {route.result: {"schema": {"type": "string"}}}
        elif route.result is not None:
            ok["content"] = _json_content(refs[route.result])
        if route.streams:
            ok["content"]["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe a stream of events
        operation["responses"] = {"200": ok, "default": errors[is_anthropic(path)]}
        if with_keys and route.audience is OPEN:
            operation["security"] = []
        paths.setdefault(path, {})[route.method.lower()] = operation
    assert not definitions["$defs"].keys() & result_schemas.keys(), "two types of one name"
    return {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], **result_schemas},
            **({"securitySchemes": SECURITY_SCHEMES} if with_keys else {}),
        },
        **({"security": [{name: []} for name in SECURITY_SCHEMES]} if with_keys else {}),
    }


def _query(fields: type[BaseModel]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in fields.model_json_schema()["properties"].items()
    ]


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
