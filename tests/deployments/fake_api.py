"""The HTTP API over a fake engine, in one process and without Ray."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from deployments.engine_replica import EngineReplica
from deployments.openai.app import openai_app
from deployments.openai.served_model import ModelInfo, ServedModel
from deployments.token_channel import TokenChannel
from engine.messages import EngineStatus, GenerateRequest
from engine.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine, Script
from tests.models import make_tokenizer

MAX_MODEL_LEN = 512


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save_pretrained(folder)
        return Tokenizer.from_folder(Path(folder))


class LocalPool:
    """An EnginePool of one replica in this process."""

    def __init__(self, replica: EngineReplica):
        self._replica = replica

    async def generate(self, request: GenerateRequest) -> None:
        await self._replica.generate(request)

    async def statuses(self) -> list[EngineStatus]:
        return [self._replica.status()]


@dataclass(slots=True)
class FakeApi:
    client: httpx.AsyncClient
    model: ServedModel
    engine: FakeEngine
    replica: EngineReplica
    channel: TokenChannel

    async def post(self, route: str, **body: Any) -> httpx.Response:
        return await self.client.post(f"/v1/{route}", json=body)

    async def stream(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """All events but the closing [DONE]."""
        response = await self.post(route, stream=True, **body)
        assert response.status_code == 200, response.text
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


@asynccontextmanager
async def fake_api(script: Script | None = None, **info: Any) -> AsyncGenerator[FakeApi]:
    """script: see FakeEngine. info: fields of ModelInfo."""
    channel, replica = TokenChannel("127.0.0.1"), EngineReplica("127.0.0.1")
    tasks = [asyncio.create_task(channel.run()), asyncio.create_task(replica.run())]
    engine = FakeEngine(replica.status_to, script)
    replica.connect(engine.address)
    fields = {"max_model_len": MAX_MODEL_LEN, "vocab_size": 400, "default_sampling": {}, "request_timeout_s": 60.0}
    model_info = ModelInfo(name="fake", root="fake", folder="", **{**fields, **info})
    model = ServedModel(model_info, tokenizer(), LocalPool(replica), channel)
    transport = httpx.ASGITransport(openai_app({"fake": model}, channel), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
            yield FakeApi(client, model, engine, replica, channel)
    finally:
        engine.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait for something that another thread makes true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def says(text: str) -> Script:
    """A script that answers every request with `text`."""
    return lambda request: tokenizer().encode(text)
