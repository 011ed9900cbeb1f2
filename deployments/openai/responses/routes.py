"""Routes of the Responses API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from fastapi import Request
from fastapi import Response as HttpResponse

from deployments.frontend.sequence import ReportedError
from deployments.http.bodies import Bodies
from deployments.http.body import validated
from deployments.http.context import RequestContext, key_name
from deployments.http.idempotency import IdempotentRoutes
from deployments.http.json_body import json_response, with_warning
from deployments.http.route import KEY, OWNER, Route
from deployments.http.streaming import EventFormat, EventStream, named_event, run_while_connected, stream
from deployments.openai.chat_body import ChatBody
from deployments.openai.chat_output import ChatOutput
from deployments.openai.responses.background import BackgroundResponses
from deployments.openai.responses.items import Item
from deployments.openai.responses.request_body import InputItemsQuery, ResponsesBody, RetrieveQuery, TextFormat
from deployments.openai.responses.response_body import (
    LIVE,
    DeletedResponse,
    InputItems,
    Response,
    ResponseEnd,
    ResponseError,
    StreamEvent,
)
from deployments.openai.responses.response_builder import ResponseBuilder
from deployments.openai.responses.store import ResponseStore, StoredResponse
from deployments.openai.served.served_model import ServedModel
from deployments.openai.served.served_models import ServedModels
from deployments.storage.key_value import StoreUnavailable
from engine.errors import InvalidParameter, RequestError

logger = logging.getLogger(__name__)

NAMED_EVENTS = EventFormat(encode=named_event, end=b"")


class ResponsesRoutes:
    def __init__(
        self,
        models: ServedModels,
        store: ResponseStore,
        idempotent: IdempotentRoutes,
        bodies: Bodies,
        deleted: Sequence[Callable[[str], Awaitable[None]]],
    ):
        """deleted: called with the id of each response that is deleted."""
        self._models, self._store, self._idempotent = models, store, idempotent
        self._bodies, self._deleted = bodies, deleted
        self._background = BackgroundResponses(store, idempotent.jobs)

    def routes(self) -> list[Route]:
        path = "/v1/responses"
        create, respond = self._idempotent.once(path)(self.create), "Respond to items of a conversation."
        one, items, body = f"{path}/{{name}}", "The input items of a stored response.", self._bodies.kind(ResponsesBody)
        return [
            Route(KEY, "POST", path, create, respond, body=body, result=Response, streams=True),
            Route(
                OWNER,
                "GET",
                one,
                self.retrieve,
                "A stored response.",
                body=RetrieveQuery,
                result=Response,
                streams=True,
            ),
            Route(OWNER, "DELETE", one, self.delete, "Delete a response.", result=DeletedResponse),
            Route(
                OWNER,
                "GET",
                f"{one}/input_items",
                self.list_input_items,
                items,
                body=InputItemsQuery,
                result=InputItems,
            ),
            Route(OWNER, "POST", f"{one}/cancel", self.cancel, "End a background response.", result=Response),
        ]

    async def create(self, request: Request) -> HttpResponse:
        body = await self._bodies.read(request, ResponsesBody)
        model, owner = await self._models.find(body.model, request), owner_of(request)
        context = RequestContext.of(request, body, "resp_")
        if body.background and context.background:
            raise InvalidParameter(
                "background", body.background, "false in a batch, which runs in the background anyway"
            )
        context = replace(context, response_id=f"resp_{context.source.hex_id('response')}")  # cannot be guessed
        if body.background and context.source.job_id is None:
            return await self._idempotent.begin(request, "/v1/responses")
        begun = await self._store.find(owner, context.response_id) if body.background else None
        if begun is not None and begun.response.status not in (*LIVE, "failed"):
            return self._answer_of(owner, begun, RetrieveQuery(stream=body.stream))
        if begun is None:
            earlier, session_id = await self._earlier(owner, body.previous_response_id)
            items = await self._store.resolve(owner, body.items)
        else:  # responses that it refers to may be gone
            earlier, items, session_id = begun.earlier, begun.input, begun.session_id
        context = replace(context, session_id=context.session_id or session_id)
        try:
            chat = body.to_chat([*earlier, *items], len(earlier), self._bodies.kind(ChatBody))
            output = await model.chat(chat, context)
            ignored = body.all_ignored(output.ignored)
            response = new_response(body, output, model, context)
            builder = ResponseBuilder(body, response, output)
            stored = StoredResponse(response, earlier, with_ids(items, response.id), session_id=context.session_id)
            if context.source.job_id is not None and body.background:
                stored.job_id = context.source.job_id
                if begun is None or begun.response.status == "failed":
                    await self._store.put(owner, stored)
                started = self._background.start(builder, owner, stored)
                answer = EventStream(started.events(-1)) if body.stream else json_response(response)
            elif body.stream:
                events = self._recorded(builder, owner, stored)
                answer = await run_while_connected(request, stream(events, NAMED_EVENTS, context.source.event_ids))
            else:
                answer = json_response(await run_while_connected(request, self._full(builder, owner, stored)))
                if body.store and not builder.response.store:
                    ignored.append("store")
        except (RequestError, ReportedError) as error:
            raise body.renamed(error) from None
        return with_warning(ignored, answer)

    async def _earlier(self, owner: str, response_id: str | None) -> tuple[list[Item], str]:
        """Return the conversation that a request continues, and its session. Raises RequestError, StoreUnavailable."""
        if response_id is None:
            return [], ""
        stored = await self._store.get(owner, response_id)
        if stored.response.status not in ("completed", "incomplete"):
            limit = f"the id of a completed response; the status of this one is {stored.response.status}"
            raise InvalidParameter("previous_response_id", response_id, limit)
        return stored.conversation, stored.session_id

    async def _full(self, builder: ResponseBuilder, owner: str, stored: StoredResponse) -> Response:
        async with aclosing(self._recorded(builder, owner, stored)) as events:
            async for _ in events:
                pass
        if builder.error is not None:
            raise builder.error
        return builder.response

    async def _recorded(
        self, builder: ResponseBuilder, owner: str, stored: StoredResponse
    ) -> AsyncGenerator[StreamEvent]:
        """Yield the events. The response is stored before the last event; if that fails, its `store` becomes false."""
        async with aclosing(builder.events()) as events:
            async for event in events:
                if isinstance(event, ResponseEnd) and builder.response.store:
                    try:
                        await self._store.put(owner, stored)
                    except StoreUnavailable as error:
                        logger.warning("response not stored response_id=%s error=%s", builder.response.id, error)
                        builder.response.store = False
                yield event

    async def retrieve(self, request: Request, name: str) -> HttpResponse:
        owner, query = owner_of(request), validated(RetrieveQuery, dict(request.query_params))
        stored = await self._store.get(owner, name)
        if self._background.find(owner, name) is None and (
            await self._background.is_abandoned(stored) or (query.stream and stored.response.status in LIVE)
        ):
            stored = await self._resumed(request, owner, stored)
        return self._answer_of(owner, stored, query)

    async def _resumed(self, request: Request, owner: str, stored: StoredResponse) -> StoredResponse:
        """Resume a response whose ingress has ended, or follow one that another ingress computes."""
        try:
            await self._idempotent.resume(request, stored.job_id)
        except (RequestError, ReportedError) as error:
            stored.response.status, stored.response.error = "failed", ResponseError("server_error", str(error))
            await self._store.put(owner, stored)
        return await self._store.get(owner, stored.response.id)

    def _answer_of(self, owner: str, stored: StoredResponse, query: RetrieveQuery) -> HttpResponse:
        running = self._background.find(owner, stored.response.id)
        if not query.stream:
            return json_response(stored.response)
        if running is not None:
            return EventStream(running.events(query.starting_after))
        if not stored.events:
            raise RequestError("only a response created with background=true can be retrieved as a stream", "stream")
        return EventStream(replay(stored.events[query.starting_after + 1 :]))

    async def list_input_items(self, request: Request, name: str) -> HttpResponse:
        query = validated(InputItemsQuery, dict(request.query_params))
        items = (await self._store.get(owner_of(request), name)).input
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

    async def cancel(self, request: Request, name: str) -> HttpResponse:
        owner = owner_of(request)
        if not (await self._store.get(owner, name)).response.background:
            raise RequestError("only a response created with background=true can be cancelled", "response_id")
        return json_response(await self._background.cancel(owner, name))

    async def delete(self, request: Request, name: str) -> HttpResponse:
        owner = owner_of(request)
        await self._background.cancel(owner, name, delete=True)
        await asyncio.gather(*(tell(name) for tell in self._deleted))
        return json_response(DeletedResponse(name))


async def replay(events: list[bytes]) -> AsyncGenerator[bytes]:
    for event in events:
        yield event


def owner_of(request: Request) -> str:
    """Return the name of the request's API key, or "". Each key finds only its own responses."""
    return key_name(request) or ""


def with_ids(items: list[Item], response_id: str) -> list[Item]:
    """Return a request's items as they are listed: each with a type and an id."""
    prefix, listed = f"in_{response_id.removeprefix('resp_')}_", []
    for i, item in enumerate(items):
        given = item.get("id")
        listed.append({"type": "message", **item, "id": given if isinstance(given, str) and given else f"{prefix}{i}"})
    return listed


def new_response(body: ResponsesBody, output: ChatOutput, model: ServedModel, context: RequestContext) -> Response:
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
        service_tier=output.service_tier,
        user=body.user,
        safety_identifier=body.safety_identifier,
    )
