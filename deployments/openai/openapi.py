"""The OpenAPI document: what the routes take and answer, from the same types that they use."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.observability.timeline import RequestTimeline
from deployments.openai.live_handoffs import LiveHandoffs
from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.responses import ChatCompletion, Completion, ErrorBody, ModelCard, ModelList
from deployments.openai.status import Load, Version
from deployments.openai.tokenize import DetokenizeBody, Prompt, TokenizeBody, Tokens

REF = "#/components/schemas/{}"
POSTS: dict[str, tuple[str, type[BaseModel], type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("Answer a conversation.", ChatBody, ChatCompletion),
    "/v1/completions": ("Go on with a text.", CompletionBody, Completion),
    "/tokenize": ("Text or messages to token ids.", TokenizeBody, Tokens),
    "/detokenize": ("Token ids to text.", DetokenizeBody, Prompt),
}
GETS: dict[str, tuple[str, type[msgspec.Struct] | str | None]] = {
    "/v1/models": ("The models that are served.", ModelList),
    "/v1/models/{name}": ("One of them.", ModelCard),
    "/health": ("200 if every model has an engine that makes progress.", None),
    "/ping": ("The same.", None),
    "/version": ("The version of this server.", Version),
    "/load": ("Requests in work at this ingress.", Load),
    "/metrics": ("Prometheus metrics.", "text/plain"),
    "/debug/handoffs": ("KV on its way between engines.", LiveHandoffs),
    "/debug/requests/{name}": ("What happened to a request; never its text.", RequestTimeline),
}
STREAMING = {"/v1/chat/completions", "/v1/completions"}


def openapi_document(version: str, *, with_keys: bool) -> dict[str, Any]:
    """with_keys: whether an API key is wanted."""
    answers = [ErrorBody, *(answer for _, _, answer in POSTS.values())]
    answers += [answer for _, answer in GETS.values() if isinstance(answer, type)]
    answer_refs, answer_schemas = msgspec.json.schema_components(answers, ref_template=REF.format("{name}"))
    refs = dict(zip(answers, answer_refs, strict=True))
    body_refs, definitions = models_json_schema(
        [(body, "validation") for _, body, _ in POSTS.values()], ref_template=REF.format("{model}")
    )
    error = {"description": "An error.", "content": _json(refs[ErrorBody])}
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, body, answer) in POSTS.items():
        content = _json(refs[answer])
        if path in STREAMING:
            content["text/event-stream"] = {}  # OpenAPI 3.1 has no word for a stream of events
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json(body_refs[body, "validation"])},
                "responses": {"200": {"description": "Done.", "content": content}, "default": error},
            }
        }
    for path, (summary, kind) in GETS.items():
        ok: dict[str, Any] = {"description": "Done."}
        if kind is not None:
            ok["content"] = {kind: {"schema": {"type": "string"}}} if isinstance(kind, str) else _json(refs[kind])
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
            "schemas": {**definitions["$defs"], **answer_schemas},
            **({"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if with_keys else {}),
        },
        **({"security": [{"key": []}]} if with_keys else {}),
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
