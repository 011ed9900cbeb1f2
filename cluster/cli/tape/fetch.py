"""Fetches the tapes of a running cluster, by GET /debug/tape."""

from __future__ import annotations

import asyncio

from cluster.cli.bench.openai_client import OpenAIClient, error_message
from engine.errors import EngineUnavailable, InvalidApiKey, NotPermitted, RequestError

TIMEOUT_S = 120.0


def fetch(url: str, api_key: str | None) -> bytes:
    """Return the tapes of all engines, as a file of tapes. Raises InvalidApiKey, NotPermitted, RequestError if there is
    no tape, or EngineUnavailable if there is no server."""

    async def get() -> tuple[int, bytes]:
        async with OpenAIClient(url, api_key, TIMEOUT_S) as client:
            return await client.get("/debug/tape")

    status, body = asyncio.run(get())
    match status:
        case 200:
            return body
        case 401:
            raise InvalidApiKey(f"{url}: {error_message(body)}")
        case 403:
            raise NotPermitted(f"{url}: {error_message(body)}")
        case 404:
            raise RequestError(f"{url} is not a Manta server: it has no /debug/tape")
        case _:
            raise EngineUnavailable(f"{url} answers {status}: {error_message(body)}")
