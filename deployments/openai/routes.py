"""The routes of chat and text completions, of tokens, and of the list of models."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response

from deployments.http.context import RequestContext
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.json_body import json_response, read_body, with_warning
from deployments.http.streaming import run_while_connected, stream
from deployments.http.validation import UnknownFields
from deployments.openai.chat import ChatResponse
from deployments.openai.completion import CompletionResponse
from deployments.openai.request_bodies import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from deployments.openai.response_bodies import ModelCard, ModelList
from deployments.openai.served_model import ServedModel
from deployments.openai.served_models import ServedModels


def add_openai_routes(
    app: FastAPI, models: ServedModels, idempotent: IdempotentRoutes, unknown_fields: UnknownFields
) -> None:
    started = int(time.time())

    @app.post("/v1/chat/completions")
    @idempotent.once("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatBody, unknown_fields)
        context = RequestContext.of(request, body, "chatcmpl")
        output = await models.find(body.model).chat(body, context)
        return await _respond(request, body, ChatResponse(body, context, output))

    @app.post("/v1/completions")
    @idempotent.once("/v1/completions")
    async def completion(request: Request) -> Response:
        body = await read_body(request, CompletionBody, unknown_fields)
        response = await models.find(body.model).completion(body, RequestContext.of(request, body, "cmpl"))
        return await _respond(request, body, response)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, unknown_fields)
        return with_warning(body, json_response(await models.find(body.model).tokenize(body)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, unknown_fields)
        return with_warning(body, json_response(await models.find(body.model).detokenize(body)))

    @app.get("/v1/models")
    async def list_models() -> Response:
        named = [(name, model) for model in models.values() for name in (model.info.name, *model.info.aliases)]
        return json_response(ModelList([card(name, model) for name, model in named]))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if not name:
            return await list_models()
        return json_response(card(name, models.find(name)))

    def card(name: str, model: ServedModel) -> ModelCard:
        return ModelCard(name, started, model.info.root, model.info.max_model_len, model.input_modalities)


async def _respond(request: Request, body: GenerationBody, response: ChatResponse | CompletionResponse) -> Response:
    if body.stream:
        return with_warning(
            body, await run_while_connected(request, stream(response.chunks(), ids=response.context.event_ids))
        )
    return with_warning(body, json_response(await run_while_connected(request, response.full())))
