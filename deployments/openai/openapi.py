"""The OpenAPI document, built from the types that the routes take and return."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.observability.timeline import RequestTimeline
from deployments.openai.debug import LiveHandoffs, ServerLoad, Version
from deployments.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from deployments.openai.responses import (
    ChatCompletion,
    Completion,
    DetokenizedText,
    ErrorBody,
    ModelCard,
    ModelList,
    Tokens,
)

REF = "#/components/schemas/{}"
POSTS: dict[str, tuple[str, type[BaseModel], type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("Answer a conversation.", ChatBody, ChatCompletion),
    "/v1/completions": ("Go on with a text.", CompletionBody, Completion),
    "/tokenize": ("Text or messages to token ids.", TokenizeBody, Tokens),
    "/detokenize": ("Token ids to text.", DetokenizeBody, DetokenizedText),
}
GETS: dict[str, tuple[str, type[msgspec.Struct] | str | None]] = {
    "/v1/models": ("The models that are served.", ModelList),
    "/v1/models/{name}": ("One of them.", ModelCard),
    "/health": ("200 if every model has an engine that makes progress.", None),
    "/ping": ("The same.", None),
    "/version": ("The version of this server.", Version),
    "/load": ("Requests in work at this ingress.", ServerLoad),
    "/metrics": ("Prometheus metrics.", "text/plain"),
    "/debug/handoffs": ("KV on its way between engines.", LiveHandoffs),
    "/debug/requests/{name}": ("What happened to a request; never its text.", RequestTimeline),
}
STREAMING = {"/v1/chat/completions", "/v1/completions"}


def openapi_document(version: str, *, with_keys: bool) -> dict[str, Any]:
    """with_keys: whether the routes require an API key."""
    responses = [ErrorBody, *(response for _, _, response in POSTS.values())]
    responses += [response for _, response in GETS.values() if isinstance(response, type)]
    response_refs, response_schemas = msgspec.json.schema_components(responses, ref_template=REF.format("{name}"))
    refs = dict(zip(responses, response_refs, strict=True))
    body_refs, definitions = models_json_schema(
        [(body, "validation") for _, body, _ in POSTS.values()], ref_template=REF.format("{model}")
    )
    error = {"description": "An error.", "content": _json_content(refs[ErrorBody])}
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, body, response) in POSTS.items():
        content = _json_content(refs[response])
        if path in STREAMING:
            content["text/event-stream"] = {}  # OpenAPI 3.1 has no word for a stream of events
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json_content(body_refs[body, "validation"])},
                "responses": {"200": {"description": "Done.", "content": content}, "default": error},
            }
        }
    for path, (summary, result) in GETS.items():
        ok: dict[str, Any] = {"description": "Done."}
        if isinstance(result, str):
            ok["content"] = {result: {"schema": {"type": "string"}}}
        elif result is not None:
            ok["content"] = _json_content(refs[result])
        paths[path] = {"get": {"summary": summary, "responses": {"200": ok, "default": error}}}
    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for path in (path for path in GETS if "{name}" in path):
        paths[path]["get"]["parameters"] = [parameter]
    if with_keys:
        paths["/health"]["get"]["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], **response_schemas},
            **({"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if with_keys else {}),
        },
        **({"security": [{"key": []}]} if with_keys else {}),
    }


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
