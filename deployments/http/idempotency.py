"""Handles requests with an Idempotency-Key, and resumes streams (docs/idempotency.md)."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from deployments.http.context import SOURCE, TIMEOUT_HEADER, key_name
from deployments.http.json_body import read_json
from deployments.http.route import OWNER, Route
from deployments.jobs.errors import IdempotencyKeyInUse, IdempotencyKeyReused
from deployments.jobs.event_ids import KNOWN_ID, LAST_EVENT_ID, Position, parse_event_id
from deployments.jobs.jobs import Jobs
from deployments.jobs.record import JobRecord, job_id_of
from deployments.jobs.source import JobSource
from deployments.routing.session import CLIENT_HEADERS, SESSION_HEADER
from engine.errors import InvalidParameter

Handler = Callable[[Request], Awaitable[Response]]
IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY = 255  # as Stripe's
FIXED_HEADERS = ("x-request-id", SESSION_HEADER, *CLIENT_HEADERS, TIMEOUT_HEADER, "content-type")
"""Headers that later requests with the same key take from the first one."""


class IdempotentRoutes:
    """Routes whose answers are kept if the request has an Idempotency-Key."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self._handlers: dict[str, Handler] = {}

    def once(self, route: str) -> Callable[[Handler], Handler]:
        """Return a decorator for the handler of a route, which makes it idempotent. Requests without a key pass
        through."""

        def decorate(handler: Handler) -> Handler:
            self._handlers[route] = handler

            @wraps(handler)
            async def with_key(request: Request) -> Response:
                key, last = request.headers.get(IDEMPOTENCY_KEY), request.headers.get(LAST_EVENT_ID)
                if key is None and not last:
                    return await handler(request)
                owner, known = key_name(request) or "", None
                if last:
                    stream_id, known = parse_event_id(last)
                if key is not None:
                    _check_key(key)
                    if last and stream_id != job_id_of(owner, key):
                        raise InvalidParameter(LAST_EVENT_ID, last, f"{KNOWN_ID}, whose {IDEMPOTENCY_KEY} is another")
                    stream_id = job_id_of(owner, key)
                body = await read_json(request)
                new = None if key is None else JobRecord.new(owner, route, body, _fixed_headers(request))
                return await self._respond(request, stream_id, owner, known, new, (route, body))

            return with_key

        return decorate

    async def begin(self, request: Request, route: str) -> Response:
        """Handle a request of a route as if it had a key. The server chooses the key, and nobody else knows it."""
        owner, body = key_name(request) or "", await read_json(request)
        new = JobRecord.new(owner, route, body, _fixed_headers(request))
        return await self._respond(request, secrets.token_hex(16), owner, None, new, None)

    async def resume(self, request: Request, job_id: str, known: Position | None = None) -> Response:
        """Answer this request with the stream of an existing job. Raises StreamNotFound."""
        return await self._respond(request, job_id, key_name(request) or "", known, None, None)

    def routes(self) -> list[Route]:
        summary = "Resume the answer to an Idempotency-Key."
        return [Route(OWNER, "GET", "/v1/streams/{name}", self.continue_stream, summary, result="text/event-stream")]

    async def continue_stream(self, request: Request, name: str) -> Response:
        last, known = request.headers.get(LAST_EVENT_ID), None
        if last:
            of, known = parse_event_id(last)
            if of != name:
                raise InvalidParameter(LAST_EVENT_ID, last, KNOWN_ID)
        return await self.resume(request, name, known)

    async def _respond(
        self,
        request: Request,
        stream_id: str,
        owner: str,
        known: Position | None,
        new: JobRecord | None,
        sent: tuple[str, bytes] | None,
    ) -> Response:
        """Answer from the job with id `stream_id`. sent: route and body of this request; None to use those of the
        job."""
        while True:
            job = await self.jobs.open(stream_id, owner, new)
            record = job.record
            job.num_requests += 1
            try:
                if sent is not None and sent != (record.route, record.body):
                    raise IdempotencyKeyReused
                return await self._handlers[record.route](_first_request(request, record, JobSource(job, known)))
            except IdempotencyKeyInUse:
                self.jobs.forget(job)  # another ingress was faster, and its record is now in the store
            finally:
                job.num_requests -= 1
                if not job.started and not job.num_requests:  # all its requests were refused: free the key
                    self.jobs.forget(job)


def _first_request(request: Request, record: JobRecord, source: JobSource) -> Request:
    """Return this request with the route, body and fixed headers of the job's first request."""
    others = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in FIXED_HEADERS]
    scope = {
        **request.scope,
        "method": "POST",
        "path": request.scope.get("root_path", "") + record.route,
        "headers": [*others, *Headers(dict(record.headers)).raw],
        "state": {**request.scope.get("state", {}), SOURCE: source},
    }
    return Request(scope, _with_body(record.body, request.receive))


def _with_body(body: bytes, then: Receive) -> Receive:
    received = False

    async def receive() -> Message:
        nonlocal received
        if received:
            return await then()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _fixed_headers(request: Request) -> dict[str, str]:
    found = {name: request.headers[name] for name in FIXED_HEADERS if name in request.headers}
    return {"x-request-id": uuid.uuid4().hex, **found}


def _check_key(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY or not (key.isascii() and key.isprintable()):
        raise InvalidParameter(IDEMPOTENCY_KEY, key, f"1 to {MAX_KEY} printable ASCII characters")
