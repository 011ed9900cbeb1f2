"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from deployments.anthropic.message import MessageResponse
from deployments.anthropic.request_bodies import CountTokensBody, MessagesBody
from deployments.anthropic.response_bodies import TokenCount
from deployments.http.body import RequestBody
from deployments.http.context import RequestContext
from deployments.http.errors import anthropic_error_body, anthropic_headers
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.json_body import json_response, read_body, with_warning
from deployments.http.streaming import EventFormat, named_event, run_while_connected, stream
from deployments.http.validation import UnknownFields
from deployments.openai.served_models import ServedModels


def add_anthropic_routes(
    app: FastAPI, models: ServedModels, idempotent: IdempotentRoutes, unknown_fields: UnknownFields
) -> None:
    @app.post("/v1/messages")
    @idempotent.once("/v1/messages")
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesBody, unknown_fields)
        model = models.find(body.model)
        chat = body.for_chat(model.info.max_model_len)
        context = RequestContext.of(request, chat, "msg")
        output = await model.chat(chat, context)
        message = MessageResponse(context.response_id, output, body.max_tokens)
        body.add_ignored(chat)
        response: Response
        if body.stream:
            events = stream(message.events(), event_format(request.scope), context.event_ids)
            response = await run_while_connected(request, events)
        else:
            response = json_response(await run_while_connected(request, message.full()))
        return _answer(request, body, response)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensBody, unknown_fields)
        tokens = await models.find(body.model).tokenize(body.for_tokenize())
        return _answer(request, body, json_response(TokenCount(tokens.count)))


def event_format(scope: Scope) -> EventFormat:
    return EventFormat(encode=named_event, error=lambda error: anthropic_error_body(error, scope)[1], end=b"")


def _answer(request: Request, body: RequestBody, response: Response) -> Response:
    response.headers.update(anthropic_headers(request.scope))
    return with_warning(body, response)
