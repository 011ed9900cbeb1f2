"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.types import Scope

from deployments.anthropic.message import MessageResponse
from deployments.anthropic.request_bodies import CountTokensBody, MessagesBody
from deployments.anthropic.response_bodies import AnthropicMessage, TokenCount
from deployments.http.bodies import Bodies
from deployments.http.context import RequestContext
from deployments.http.errors import anthropic_error_body, anthropic_headers
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.json_body import json_response, with_warning
from deployments.http.route import KEY, Route
from deployments.http.streaming import EventFormat, named_event, run_while_connected, stream
from deployments.openai.chat_body import ChatBody
from deployments.openai.served.served_models import ServedModels


class AnthropicRoutes:
    def __init__(self, models: ServedModels, idempotent: IdempotentRoutes, bodies: Bodies):
        self._models, self._idempotent, self._bodies = models, idempotent, bodies

    def routes(self) -> list[Route]:
        path, summary = "/v1/messages", "Answer a conversation, by Anthropic's API."
        messages, count = self._idempotent.once(path)(self.messages), "Count the tokens of a prompt."
        counts = f"{path}/count_tokens"
        return [
            Route(KEY, "POST", path, messages, summary, body=MessagesBody, result=AnthropicMessage, streams=True),
            Route(KEY, "POST", counts, self.count_tokens, count, body=CountTokensBody, result=TokenCount),
        ]

    async def messages(self, request: Request) -> Response:
        body = await self._bodies.read(request, MessagesBody)
        model = await self._models.find(body.model, request)
        chat = body.for_chat(model.info.max_model_len, self._bodies.kind(ChatBody))
        context = RequestContext.of(request, chat, "msg_")
        output = await model.chat(chat, context)
        message = MessageResponse(context.response_id, output, model.info.max_model_len)
        response: Response
        if body.stream:
            events = stream(message.events(), event_format(request.scope), context.source.event_ids)
            response = await run_while_connected(request, events)
        else:
            response = json_response(await run_while_connected(request, message.full()))
        return _answer(request, body.all_ignored(chat, output.ignored), response)

    async def count_tokens(self, request: Request) -> Response:
        body = await self._bodies.read(request, CountTokensBody)
        model = await self._models.find(body.model, request)
        tokens = await model.tokenize(body.for_tokenize())
        return _answer(request, body.ignored, json_response(TokenCount(tokens.count)))


def event_format(scope: Scope) -> EventFormat:
    return EventFormat(encode=named_event, error=lambda error: anthropic_error_body(error, scope)[1], end=b"")


def _answer(request: Request, ignored: list[str], response: Response) -> Response:
    response.headers.update(anthropic_headers(request.scope))
    return with_warning(ignored, response)
