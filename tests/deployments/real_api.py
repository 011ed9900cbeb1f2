"""The HTTP API over a real engine and real sockets, in one process and without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from deployments.admission import AdmissionLimits
from deployments.engine_replica import EngineReplica
from deployments.openai.app import openai_app
from deployments.openai.served_model import ModelInfo, ServedModel
from deployments.telemetry import Telemetry
from deployments.token_channel import TokenChannel
from deployments.tracing import Tracing
from engine.config import EngineConfig
from engine.server import EngineServer
from engine.tokenizer import Tokenizer
from tests.deployments.fake_api import LocalPool
from tests.scrape import Scrape

MAX_NUM_SEQS = 8
LIMITS = AdmissionLimits(
    max_num_seqs=MAX_NUM_SEQS, num_engines=1, num_ingresses=1, max_waiting=64, max_waiting_tokens=10_000
)


@dataclass(slots=True)
class RealApi:
    client: httpx.AsyncClient
    replica: EngineReplica

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """A greedy completion that goes on to max_tokens."""
        body = {"temperature": 0, "ignore_eos": True, **body}
        answer = await self.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def leave_a_stream(self, **body: Any) -> None:
        """Close the connection after the first token."""
        body = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())

    async def scrape(self) -> Scrape:
        return Scrape((await self.client.get("/metrics")).text)

    async def scrape_when(self, condition: Callable[[Scrape], bool], timeout_s: float = 10.0) -> Scrape:
        """Engines report a moment after their requests have ended."""
        async with asyncio.timeout(timeout_s):
            while not condition(scrape := await self.scrape()):
                await asyncio.sleep(0.01)
        return scrape


@asynccontextmanager
async def real_api(folder: Path, tracing: Tracing | None = None) -> AsyncGenerator[RealApi]:
    """folder: a model, served as `tiny`."""
    channel, replica = TokenChannel("127.0.0.1"), EngineReplica("127.0.0.1")
    config = EngineConfig(model=str(folder), block_size=4, num_blocks=512, max_num_seqs=MAX_NUM_SEQS, num_threads=1)
    engine = await asyncio.to_thread(EngineServer, config, engine_id="decode-1", status_to=replica.status_to)
    thread = threading.Thread(target=engine.run)
    thread.start()
    replica.connect(engine.address)
    telemetry = Telemetry("ingress-1", channel, tracing)
    info = ModelInfo(
        name="tiny",
        root=str(folder),
        folder=str(folder),
        max_model_len=engine.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        default_sampling={},
        request_timeout_s=60.0,
        admission=LIMITS,
    )
    model = ServedModel(info, Tokenizer.from_folder(folder), LocalPool(replica), channel, telemetry)
    app = openai_app({"tiny": model}, telemetry)
    web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    tasks = [asyncio.create_task(each) for each in (channel.run(), replica.run(), web.serve())]
    try:
        async with asyncio.timeout(10):
            while not web.started:
                await asyncio.sleep(0.01)
        port = web.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield RealApi(client, replica)
    finally:
        web.should_exit = True
        await asyncio.wait(tasks[2:], timeout=10)
        engine.stop()
        await asyncio.to_thread(thread.join)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
