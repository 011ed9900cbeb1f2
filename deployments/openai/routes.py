"""Routes of chat and text completions, tokenization, and the list of models."""

from __future__ import annotations

import time

from fastapi import Request, Response

from deployments.http.bodies import Bodies
from deployments.http.context import RequestContext
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.json_body import json_response, with_warning
from deployments.http.route import KEY, Route
from deployments.http.streaming import run_while_connected, stream
from deployments.openai.chat import ChatResponse
from deployments.openai.chat_body import ChatBody
from deployments.openai.completion import CompletionResponse
from deployments.openai.completion_body import CompletionBody, DetokenizeBody
from deployments.openai.response_bodies import ChatCompletion, Completion, DetokenizedText, ModelCard, ModelList, Tokens
from deployments.openai.sampling_body import GenerationBody
from deployments.openai.served.served_model import ServedModel
from deployments.openai.served.served_models import ServedModels
from deployments.openai.template_body import TokenizeBody


class OpenAIRoutes:
    def __init__(self, models: ServedModels, idempotent: IdempotentRoutes, bodies: Bodies):
        self._models, self._idempotent, self._bodies = models, idempotent, bodies
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        once, chats, completions = self._idempotent.once, "/v1/chat/completions", "/v1/completions"
        chat = self._bodies.kind(ChatBody)
        answer, continue_text = "Answer a conversation.", "Continue a text."
        tokens, text = "Convert text or messages to token ids.", "Convert token ids to text."
        return [
            Route(
                KEY,
                "POST",
                chats,
                once(chats)(self.chat),
                answer,
                body=chat,
                result=ChatCompletion,
                streams=True,
            ),
            Route(
                KEY,
                "POST",
                completions,
                once(completions)(self.completion),
                continue_text,
                body=self._bodies.kind(CompletionBody),
                result=Completion,
                streams=True,
            ),
            Route(KEY, "POST", "/tokenize", self.tokenize, tokens, body=TokenizeBody, result=Tokens),
            Route(KEY, "POST", "/detokenize", self.detokenize, text, body=DetokenizeBody, result=DetokenizedText),
            Route(KEY, "GET", "/v1/models", self.list_models, "The served models.", result=ModelList),
            Route(KEY, "GET", "/v1/models/{name:path}", self.retrieve_model, "One model.", result=ModelCard),
        ]

    async def chat(self, request: Request) -> Response:
        body = await self._bodies.read(request, ChatBody)
        context = RequestContext.of(request, body, "chatcmpl-")
        output = await (await self._models.find(body.model, request)).chat(body, context)
        return await _respond(request, body, ChatResponse(body, context, output))

    async def completion(self, request: Request) -> Response:
        body = await self._bodies.read(request, CompletionBody)
        model, context = await self._models.find(body.model, request), RequestContext.of(request, body, "cmpl-")
        response = await model.completion(body, context)
        return await _respond(request, body, response)

    async def tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, TokenizeBody)
        model = await self._models.find(body.model, request)
        return with_warning(body.ignored, json_response(await model.tokenize(body)))

    async def detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, DetokenizeBody)
        model = await self._models.find(body.model, request)
        return with_warning(body.ignored, json_response(await model.detokenize(body)))

    async def list_models(self, request: Request) -> Response:
        return json_response(ModelList([self._card(*found) async for found in self._models.listed(request)]))

    async def retrieve_model(self, request: Request, name: str) -> Response:
        if not name:
            return await self.list_models(request)
        model = await self._models.find(name, request)
        parent = None if model.info.adapter is None else model.info.adapter.parent
        return json_response(self._card(name, model, model.info.root, parent))

    def _card(self, name: str, model: ServedModel, root: str, parent: str | None) -> ModelCard:
        length, modalities = model.info.max_model_len, model.input_modalities
        return ModelCard(name, self._started, root, length, modalities, parent=parent)


async def _respond(request: Request, body: GenerationBody, response: ChatResponse | CompletionResponse) -> Response:
    answer: Response
    if body.stream:
        events = stream(response.chunks(), ids=response.context.source.event_ids)
        answer = await run_while_connected(request, events)
    else:
        answer = json_response(await run_while_connected(request, response.full()))
    return with_warning(response.ignored, answer)
