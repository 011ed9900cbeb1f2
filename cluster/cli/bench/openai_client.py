"""Client of OpenAI-compatible servers: streamed answers, with the arrival times of their tokens.

Uses aiohttp rather than httpx, because aiohttp takes a fraction of the CPU time per chunk, and the load generator often
shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
import msgspec

from deployments.errors import InvalidApiKey, NotPermitted, RequestNotFound
from engine.errors import EngineUnavailable, RequestError

ERROR_CHARACTERS = 200
FETCH_S = 120.0


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thought(self) -> str | None:
        return self.reasoning or self.reasoning_content


class ChunkChoice(msgspec.Struct):
    text: str | None = None  #: text of a completion
    delta: ChunkDelta | None = None  #: delta of a chat
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.thought)))


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class StreamChunk(msgspec.Struct):
    """A stream event, reduced to the fields used here."""

    id: str = ""
    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: msgspec.Raw | None = None


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. Times are seconds since it was sent."""

    sent_at: float = 0.0  #: time of sending on the client's clock
    prompt_tokens: int | None = None  #: from the server's usage
    cached_tokens: int | None = None  #: of these, from the server's usage; None if it does not tell
    output_tokens: int = 0  #: from the server's usage, or the number of chunks with text
    has_usage: bool = False
    ttft_s: float = 0.0  #: to the first chunk with text (a chat's first chunk has only a role), or to the end
    itl_s: list[float] = field(default_factory=list)  #: between chunks with text, which may hold several tokens
    e2el_s: float = 0.0  #: to its last chunk, or to its failure
    error: str | None = None
    last_text_at: float | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there is only one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def add(self, chunk: StreamChunk, now: float) -> None:
        if chunk.choices:
            self.e2el_s = now - self.sent_at
            if self.last_text_at is None:
                self.ttft_s = self.e2el_s
        if any(choice.has_text for choice in chunk.choices):
            if self.last_text_at is not None:
                self.itl_s.append(now - self.last_text_at)
            self.last_text_at = now
            self.output_tokens += not self.has_usage
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self.has_usage = True
            self.prompt_tokens, self.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens


class StreamFailed(Exception):
    """A request that failed. The text says why."""


CHUNKS = msgspec.json.Decoder(StreamChunk)


class EventParser:
    """Splits a stream of server-sent events, which may arrive in any pieces, into their data."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class ChunkParser:
    """Parses the events of a stream into chunks."""

    def __init__(self) -> None:
        self._events = EventParser()
        self._ended = False

    def feed(self, piece: bytes) -> list[StreamChunk]:
        """Return the chunks that this piece completes. Raises StreamFailed for an error of the server, or for an
        invalid chunk."""
        events = self._events.feed(piece)
        self._ended |= b"[DONE]" in events
        return [self._chunk(event) for event in events if event != b"[DONE]"]

    def _chunk(self, event: bytes) -> StreamChunk:
        try:
            chunk = CHUNKS.decode(event)
        except msgspec.DecodeError as e:
            raise StreamFailed(f"not a chunk of a completion ({e}): {shorten(event)}") from e
        if chunk.error is not None:
            raise StreamFailed(error_message(event))
        self._ended |= any(choice.finish_reason for choice in chunk.choices)
        return chunk

    def close(self) -> None:
        """Raise StreamFailed unless the answer is complete."""
        if not self._ended:
            raise StreamFailed("the stream ended early")


class OpenAIClient:
    """A connection pool to one server. Enter it in the event loop in which it is used.

    base_url: with or without `http://` and `/v1`.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float):
        base_url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.base_url = base_url if "://" in base_url else f"http://{base_url}"
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> OpenAIClient:
        # no limit on connections: `--max-concurrency` is enforced elsewhere
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the served models; empty if the server does not list them.

        Raises InvalidApiKey, and EngineUnavailable if there is no ready server.
        """
        status, body = await self.get("/v1/models")
        if status >= 500:
            raise EngineUnavailable(f"{self.base_url} is not ready: HTTP {status} {error_message(body)}")
        if status == 401:
            raise InvalidApiKey(f"{self.base_url}: {error_message(body)}")
        try:
            return [model["id"] for model in msgspec.json.decode(body)["data"]]
        except (msgspec.DecodeError, KeyError, TypeError):  # not every server has the endpoint
            return []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises EngineUnavailable if there is no server."""
        try:
            async with self._session.get(self.base_url + path) as response:
                return response.status, await response.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as e:
            raise RequestError(f"base_url must be like http://127.0.0.1:8000, got {self.base_url!r}", "base_url") from e
        except (aiohttp.ClientError, TimeoutError) as e:
            raise EngineUnavailable(f"no server answers at {self.base_url}: {describe(e, self.timeout_s)}") from e

    async def events(self, path: str) -> AsyncGenerator[bytes]:
        """Yield the data of each server-sent event until the stream ends. Raises InvalidApiKey, RequestError if the
        server has no such stream, or EngineUnavailable if the server is gone."""
        try:
            async with self._session.get(self.base_url + path) as response:
                if response.status == 401:
                    raise InvalidApiKey(f"{self.base_url}: {error_message(await response.read())}")
                if response.status != 200:
                    raise RequestError(f"{self.base_url} has no {path}: HTTP {response.status}")
                parser = EventParser()
                async for piece in response.content.iter_any():
                    for event in parser.feed(piece):
                        yield event
        except (aiohttp.ClientError, TimeoutError) as e:
            raise EngineUnavailable(f"no server answers at {self.base_url}: {describe(e, self.timeout_s)}") from e

    async def chunks(self, path: str, body: bytes, session: str = "") -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of one answer. session: id of its conversation, if any. Raises StreamFailed if the answer is
        incomplete."""
        parser, headers = ChunkParser(), {"X-Session-Id": session} if session else {}
        try:
            async with self._session.post(self.base_url + path, data=body, headers=headers) as response:
                if response.status != 200:
                    raise StreamFailed(f"HTTP {response.status}: {error_message(await response.read())}")
                async for data in response.content.iter_any():
                    for chunk in parser.feed(data):
                        yield chunk
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as e:
            raise StreamFailed(describe(e, self.timeout_s)) from e
        parser.close()

    async def send(self, path: str, body: bytes, session: str = "") -> RequestResult:
        """Stream one answer to its end. session: as for `chunks`. Returns the outcome, which may be a failure."""
        outcome = RequestResult(sent_at=time.perf_counter())
        try:
            async for chunk in self.chunks(path, body, session):
                outcome.add(chunk, time.perf_counter())
        except StreamFailed as e:
            outcome.error, outcome.e2el_s = str(e), time.perf_counter() - outcome.sent_at
        return outcome


def fetch(url: str, path: str, api_key: str | None, name: str = "") -> bytes:
    """Return what a server of Manta answers to GET `path`, or to GET `path`/`name`.

    Raises InvalidApiKey, NotPermitted, RequestNotFound if the server knows no such name, RequestError if it has no such
    path, or EngineUnavailable if there is no server.
    """

    async def get() -> tuple[int, bytes]:
        async with OpenAIClient(url, api_key, FETCH_S) as client:
            return await client.get(f"{path}/{quote(name, safe='')}" if name else path)

    status, body = asyncio.run(get())
    match status:
        case 200:
            return body
        case 401:
            raise InvalidApiKey(f"{url}: {error_message(body)}")
        case 403:
            raise NotPermitted(f"{url}: {error_message(body)}")
        case 404 if b"session_not_found" in body:
            raise RequestError(f"{url}: {error_message(body)}")
        case 404 if name and b"not_found_error" in body:
            raise RequestNotFound(name)
        case 404:
            raise RequestError(f"{url} is not a Manta server: it has no {path}")
        case _:
            raise EngineUnavailable(f"{url} answers {status}: {error_message(body)}")


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error, or the body if it is not one."""
    try:
        error = msgspec.json.decode(body)["error"]
        return shorten(error if isinstance(error, str) else error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return shorten(body)


def shorten(text: str | bytes) -> str:
    """Return the text on one line, shortened."""
    whole = " ".join((text if isinstance(text, str) else text.decode(errors="replace")).split())
    return whole[:ERROR_CHARACTERS] + "…" if len(whole) > ERROR_CHARACTERS else whole


def describe(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"not finished within {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "connection refused"
    return shorten(f"{type(error).__name__}: {error}")
