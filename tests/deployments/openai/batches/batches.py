"""Batches for tests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from openai.types import Batch

from tests.deployments.fake_api import FakeApi

ENDED = {"failed", "completed", "expired", "cancelled"}


def line(custom_id: Any, url: str = "/v1/completions", method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"prompt": "ab", "max_tokens": 2, **body}}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def client_of(api: FakeApi, key: str = "x") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url="http://fake/v1", http_client=api.client, max_retries=0)


async def start(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = "/v1/completions", **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    """The batch when it has ended."""
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.01)
    return batch


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file, in the order of their custom_ids."""
    if file_id is None:
        return []
    lines = (await client.files.content(file_id)).text.splitlines()
    return sorted(map(json.loads, lines), key=lambda answer: str(answer["custom_id"]))
