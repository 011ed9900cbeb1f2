"""The OpenAPI document, built from the types that the routes take and return."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.anthropic.request_bodies import CountTokensBody, MessagesBody
from deployments.anthropic.response_bodies import AnthropicMessage, TokenCount
from deployments.http.debug import LiveHandoffs, ServerLoad, Version
from deployments.http.errors import AnthropicErrorBody, ErrorBody, is_anthropic
from deployments.http.middleware import is_open
from deployments.observability.timeline import RequestTimeline
from deployments.openai.batches.files import File
from deployments.openai.batches.objects import (
    Batch,
    BatchBody,
    BatchList,
    BatchQuery,
    DeletedFile,
    FileList,
    FileQuery,
    UploadForm,
)
from deployments.openai.batches.routes import FORM
from deployments.openai.request_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from deployments.openai.response_bodies import (
    ChatCompletion,
    Completion,
    DetokenizedText,
    ModelCard,
    ModelList,
    Tokens,
)
from deployments.openai.responses.request_body import InputItemsQuery, ResponsesBody, RetrieveQuery
from deployments.openai.responses.response_body import DeletedResponse, InputItems, Response
from deployments.pooling.request_bodies import EmbeddingBody, RerankBody, ScoreBody
from deployments.pooling.response_bodies import EmbeddingList, Ranking, ScoreList

REF = "#/components/schemas/{}"
# (method, path): (summary, request body or with GET the query, response body or its media type)
ROUTES: dict[tuple[str, str], tuple[str, type[BaseModel] | None, type[msgspec.Struct] | str | None]] = {
    ("post", "/v1/chat/completions"): ("Answer a conversation.", ChatBody, ChatCompletion),
    ("post", "/v1/completions"): ("Go on with a text.", CompletionBody, Completion),
    ("post", "/v1/embeddings"): ("Texts to vectors.", EmbeddingBody, EmbeddingList),
    ("post", "/v1/score"): ("How well documents fit queries.", ScoreBody, ScoreList),
    ("post", "/score"): ("The same.", ScoreBody, ScoreList),
    ("post", "/v1/rerank"): ("Documents by how well they fit a query.", RerankBody, Ranking),
    ("post", "/v2/rerank"): ("The same.", RerankBody, Ranking),
    ("post", "/rerank"): ("The same.", RerankBody, Ranking),
    ("post", "/v1/messages"): ("Answer a conversation, by Anthropic's API.", MessagesBody, AnthropicMessage),
    ("post", "/v1/messages/count_tokens"): ("The length of its prompt.", CountTokensBody, TokenCount),
    ("post", "/tokenize"): ("Text or messages to token ids.", TokenizeBody, Tokens),
    ("post", "/detokenize"): ("Token ids to text.", DetokenizeBody, DetokenizedText),
    ("get", "/v1/models"): ("The models that are served.", None, ModelList),
    ("get", "/v1/models/{name}"): ("One of them.", None, ModelCard),
    ("post", "/v1/responses"): ("Respond to items of a conversation.", ResponsesBody, Response),
    ("get", "/v1/responses/{name}"): ("A stored response.", RetrieveQuery, Response),
    ("delete", "/v1/responses/{name}"): ("Delete it.", None, DeletedResponse),
    ("get", "/v1/responses/{name}/input_items"): ("What its request brought.", InputItemsQuery, InputItems),
    ("post", "/v1/responses/{name}/cancel"): ("End it, if it runs in the background.", None, Response),
    ("get", "/v1/streams/{name}"): ("Go on with the answer to an Idempotency-Key.", None, "text/event-stream"),
    ("post", "/v1/files"): ("Store the requests of a batch.", UploadForm, File),
    ("get", "/v1/files"): ("The files, newest first.", FileQuery, FileList),
    ("get", "/v1/files/{name}"): ("One of them.", None, File),
    ("delete", "/v1/files/{name}"): ("Delete it.", None, DeletedFile),
    ("get", "/v1/files/{name}/content"): ("Its content.", None, "application/octet-stream"),
    ("post", "/v1/batches"): ("Answer the requests of a file.", BatchBody, Batch),
    ("get", "/v1/batches"): ("The batches, newest first.", BatchQuery, BatchList),
    ("get", "/v1/batches/{name}"): ("One of them.", None, Batch),
    ("post", "/v1/batches/{name}/cancel"): ("Give it up.", None, Batch),
    ("get", "/health"): ("200 if every model has an engine that makes progress.", None, None),
    ("get", "/ping"): ("The same.", None, None),
    ("get", "/version"): ("The version of this server.", None, Version),
    ("get", "/load"): ("Requests in work at this ingress.", None, ServerLoad),
    ("post", "/reset_prefix_cache"): ("Have all engines forget their cached prefixes.", None, None),
    ("get", "/metrics"): ("Prometheus metrics.", None, "text/plain"),
    ("get", "/debug/handoffs"): ("KV on its way between engines.", None, LiveHandoffs),
    ("get", "/debug/requests/{name}"): ("What happened to a request; never its text.", None, RequestTimeline),
}
STREAMING = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{name}", "/v1/messages"
}  # fmt: skip
FORMS = {"/v1/files"}
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


@cache  # it takes a tenth of a second
def openapi_document(version: str, *, with_keys: bool) -> dict[str, Any]:
    """with_keys: whether the routes require an API key."""
    results = [ErrorBody, AnthropicErrorBody, *(result for _, _, result in ROUTES.values() if isinstance(result, type))]
    result_refs, result_schemas = msgspec.json.schema_components(results, ref_template=REF.format("{name}"))
    refs = dict(zip(results, result_refs, strict=True))
    body_refs, definitions = models_json_schema(
        [(body, "validation") for (method, _), (_, body, _) in ROUTES.items() if body and method != "get"],
        ref_template=REF.format("{model}"),
    )
    errors = {
        anthropic: {"description": "An error.", "content": _json_content(refs[body])}
        for anthropic, body in ((False, ErrorBody), (True, AnthropicErrorBody))
    }
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), (summary, body, result) in ROUTES.items():
        operation: dict[str, Any] = {"summary": summary}
        operation["parameters"] = [NAME] if "{name}" in path else []
        if body is not None and method == "get":
            operation["parameters"] += _query(body)
        elif body is not None:
            content = {FORM if path in FORMS else "application/json": {"schema": body_refs[body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        ok: dict[str, Any] = {"description": "Done."}
        if isinstance(result, str):
            ok["content"] = {result: {"schema": {"type": "string"}}}
        elif result is not None:
            ok["content"] = _json_content(refs[result])
        if path in STREAMING:
            ok["content"]["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe a stream of events
        operation["responses"] = {"200": ok, "default": errors[is_anthropic(path)]}
        if with_keys and is_open(path):
            operation["security"] = []
        paths.setdefault(path, {})[method] = operation
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
