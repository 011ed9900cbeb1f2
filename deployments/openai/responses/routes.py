"""The routes of the Responses API."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi import Response as HttpResponse

from deployments.frontend.sequence import ReportedError
from deployments.http.body import validated
from deployments.http.context import RequestContext, key_name
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.json_body import json_response, read_body, with_warning
from deployments.http.streaming import EventFormat, EventStream, named_event, run_while_connected, stream
from deployments.http.validation import UnknownFields
from deployments.openai.request_bodies import ChatBody
from deployments.openai.responses.background import BackgroundResponses
from deployments.openai.responses.errors import ResponseNotFound
from deployments.openai.responses.items import Item
from deployments.openai.responses.request_body import InputItemsQuery, ResponsesBody, RetrieveQuery, TextFormat
from deployments.openai.responses.response_body import (
    LIVE,
    DeletedResponse,
    InputItems,
    Response,
    ResponseEnd,
    StreamEvent,
)
from deployments.openai.responses.response_builder import ResponseBuilder
from deployments.openai.responses.store import ResponseStore, StoredResponse
from deployments.openai.served_model import ServedModel
from deployments.openai.served_models import ServedModels
from deployments.storage.key_value import StoreUnavailable
from engine.errors import InvalidParameter, RequestError

logger = logging.getLogger(__name__)

NAMED_EVENTS = EventFormat(encode=named_event, end=b"")


def add_responses_routes(
    app: FastAPI,
    models: ServedModels,
    store: ResponseStore,
    idempotent: IdempotentRoutes,
    unknown_fields: UnknownFields,
) -> None:
    background = BackgroundResponses(store)

    @app.post("/v1/responses")
    @idempotent.once("/v1/responses")
    async def create(request: Request) -> HttpResponse:
        body = await read_body(request, ResponsesBody, unknown_fields)
        model, owner = models.find(body.model), owner_of(request)
        context = RequestContext.of(request, body, "resp")
        secret = secrets.token_hex(16) if context.answer is None else context.answer.hex_id("response")
        context = replace(context, response_id=f"resp_{secret}")  # nobody is to guess it
        earlier = await earlier_items(owner, body.previous_response_id)
        items = await store.resolve(owner, body.items)
        if body.background and context.answer is not None and await begun(owner, context.response_id):
            return await found(owner, context.response_id, RetrieveQuery(stream=body.stream))
        try:
            chat = body.to_chat([*earlier, *items], len(earlier))
            output = await model.chat(chat, context)
            body.ignore(chat.ignored)
            response = new_response(body, chat, model, context)
            builder = ResponseBuilder(body, response, output)
            stored = StoredResponse(response, earlier, with_ids(items, response.id))
            if body.background:
                started = await background.start(builder, owner, stored, context.answer)
                answer = EventStream(started.events(-1)) if body.stream else json_response(response)
            elif body.stream:
                events = recorded(builder, owner, stored)
                answer = await run_while_connected(request, stream(events, NAMED_EVENTS, context.event_ids))
            else:
                answer = json_response(await run_while_connected(request, full(builder, owner, stored, body)))
        except (RequestError, ReportedError) as error:
            raise body.renamed(error) from None
        return with_warning(body, answer)

    async def earlier_items(owner: str, response_id: str | None) -> list[Item]:
        """Return the conversation that a request goes on from. Raises RequestError, StoreUnavailable."""
        if response_id is None:
            return []
        stored = await store.get(owner, response_id)
        if stored.response.status not in ("completed", "incomplete"):
            limit = f"the id of a completed response, not of one that is {stored.response.status}"
            raise InvalidParameter("previous_response_id", response_id, limit)
        return stored.conversation

    async def full(builder: ResponseBuilder, owner: str, stored: StoredResponse, body: ResponsesBody) -> Response:
        async with aclosing(recorded(builder, owner, stored)) as events:
            async for _ in events:
                pass
        if builder.error is not None:
            raise builder.error
        if body.store and not builder.response.store:
            body.ignored.append("store")
        return builder.response

    async def recorded(builder: ResponseBuilder, owner: str, stored: StoredResponse) -> AsyncGenerator[StreamEvent]:
        """Yield the events; the response is stored before the last one. If that fails, its `store` is false."""
        async with aclosing(builder.events()) as events:
            async for event in events:
                if isinstance(event, ResponseEnd) and builder.response.store:
                    try:
                        await store.put(owner, stored)
                    except StoreUnavailable as error:
                        logger.warning("response not stored response_id=%s error=%s", builder.response.id, error)
                        builder.response.store = False
                yield event

    async def begun(owner: str, response_id: str) -> bool:
        """Return whether the response of an earlier request with the same key runs or has ended."""
        try:
            return (await store.get(owner, response_id)).response.status != "failed"
        except ResponseNotFound:
            return False

    @app.get("/v1/responses/{name}")
    async def retrieve(request: Request, name: str) -> HttpResponse:
        return await found(owner_of(request), name, validated(RetrieveQuery, dict(request.query_params)))

    async def found(owner: str, name: str, query: RetrieveQuery) -> HttpResponse:
        running = background.find(owner, name)
        stored = await store.get(owner, name)
        if not query.stream:
            return json_response(stored.response)
        if running is not None:
            return EventStream(running.events(query.starting_after))
        if stored.response.status in LIVE:
            raise RequestError("another ingress computes this response; retrieve it without stream", "stream")
        if not stored.events:
            raise RequestError("only a response created with background=true can be retrieved as a stream", "stream")
        return EventStream(replay(stored.events[query.starting_after + 1 :]))

    @app.get("/v1/responses/{name}/input_items")
    async def list_input_items(request: Request, name: str) -> HttpResponse:
        query = validated(InputItemsQuery, dict(request.query_params))
        items = (await store.get(owner_of(request), name)).input
        if query.order == "desc":
            items = items[::-1]
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise InvalidParameter("after", query.after, "the id of an item of this response's input")
            items = items[ids.index(query.after) + 1 :]
        page = items[: query.limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(InputItems(page, first, last, has_more=len(items) > len(page)))

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(request: Request, name: str) -> HttpResponse:
        owner = owner_of(request)
        if not (await store.get(owner, name)).response.background:
            raise RequestError("only a response created with background=true can be cancelled", "response_id")
        return json_response(await background.cancel(owner, name))

    @app.delete("/v1/responses/{name}")
    async def delete(request: Request, name: str) -> HttpResponse:
        owner = owner_of(request)
        await background.cancel(owner, name)
        await store.delete(owner, name)
        return json_response(DeletedResponse(name))


async def replay(events: list[bytes]) -> AsyncGenerator[bytes]:
    for event in events:
        yield event


def owner_of(request: Request) -> str:
    """Return the name of the API key; each key finds its own responses only."""
    return key_name(request) or ""


def with_ids(items: list[Item], response_id: str) -> list[Item]:
    """Return the items of a request as they are listed: each has a type, and a text as its id."""
    prefix, listed = f"in_{response_id.removeprefix('resp_')}_", []
    for i, item in enumerate(items):
        given = item.get("id")
        listed.append({"type": "message", **item, "id": given if isinstance(given, str) and given else f"{prefix}{i}"})
    return listed


def new_response(body: ResponsesBody, chat: ChatBody, model: ServedModel, context: RequestContext) -> Response:
    def setting(name: Literal["temperature", "top_p"]) -> Any:
        value = getattr(body, name)
        return model.info.default_sampling.get(name, 1.0) if value is None else value

    text_format = body.text.format or TextFormat(type="text")
    return Response(
        id=context.response_id,
        created_at=context.created,
        status="queued",
        model=model.info.name,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        tools=body.tools,
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls,
        text={"format": text_format.model_dump(by_alias=True, exclude_unset=True)},
        reasoning={"effort": body.reasoning.effort, "summary": None},
        temperature=setting("temperature"),
        top_p=setting("top_p"),
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        truncation=body.truncation,
        background=body.background,
        store=body.store,
        metadata=body.metadata,
        service_tier=chat.served_tier,
        user=body.user,
        safety_identifier=body.safety_identifier,
    )
