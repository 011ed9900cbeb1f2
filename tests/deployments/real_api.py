"""The HTTP API over a real engine and real sockets, in one process and without Ray."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from deployments.app import http_app
from deployments.frontend.admission import AdmissionLimits
from deployments.frontend.token_channel import TokenChannel
from deployments.http.middleware import AuthConfig
from deployments.observability.telemetry import Telemetry
from deployments.observability.tracing import Tracing
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.options.images import ImageConfig
from deployments.parts.images.image_loader import ImageLoader
from deployments.parts.table import model_parts
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.pools import EnginePool, ReplicaStatus
from deployments.replicas.remote_dispatcher import PoolState
from deployments.routing.balancer import Balancer
from deployments.routing.config import RoutingConfig
from deployments.routing.prompt_digest import PromptDigest
from deployments.routing.stats import RoutingStats
from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.model.checkpoint.resolve import has_image_processor
from engine.model.config import ModelConfig
from engine.options.handoff import HandoffConfig
from engine.serving.server import EngineServer
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.remote_request import RemoteRequest
from engine.wire.stats.handoff_stats import PeerPool
from tests.deployments.fake_api import LocalPool, until
from tests.scrape import NoSeries, Scrape

MAX_NUM_SEQS = 8
BLOCK_SIZE = 4
LIMITS = AdmissionLimits(
    max_num_seqs=MAX_NUM_SEQS, num_engines=1, num_ingresses=1, max_waiting=64, max_waiting_tokens=10_000
)
IMAGES = ImageConfig(allowed_private_networks=("127.0.0.1",))


@dataclass(slots=True)
class RealApi:
    client: httpx.AsyncClient

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        """A greedy completion that goes on to max_tokens."""
        body = {"temperature": 0, "ignore_eos": True, **body}
        response = await self.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def leave_a_stream(self, **body: Any) -> None:
        """Close the connection after the first token."""
        body = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())

    async def scrape(self) -> Scrape:
        return Scrape((await self.client.get("/metrics")).text)

    async def scrape_when(self, condition: Callable[[Scrape], bool], timeout_s: float = 60.0) -> Scrape:
        """Engines report a moment after their start, and after requests have ended."""
        async with asyncio.timeout(timeout_s):
            while True:
                scrape = await self.scrape()
                with suppress(NoSeries):
                    if condition(scrape):
                        return scrape
                await asyncio.sleep(0.01)


class LocalRemotePool:
    """A RemotePool of one replica in this process. It is chosen as any other would be, so that that counts."""

    def __init__(self, replica: EngineReplica):
        self.routing = RoutingStats()
        self._replica = replica
        self._balancer = Balancer(RoutingConfig(), "prefill", BLOCK_SIZE, random.Random(0))
        self._balancer.use_stats(self.routing)

    async def prefill(self, remote_request: RemoteRequest, avoid: list[str]) -> None:
        prompt = PromptDigest(remote_request.handoff_id, len(remote_request.token_ids), ())
        self._balancer.choose(prompt, [self._replica.status().engine_id])
        await self._replica.run_request(EncodedRequest.of(remote_request))

    async def statuses(self) -> list[ReplicaStatus]:
        return [self._replica.status()]

    async def state(self) -> PoolState:
        return "up"


class LocalPools(LocalPool):
    """An EnginePool of one decode and one prefill replica."""

    def __init__(self, replica: EngineReplica, prefill: LocalRemotePool):
        super().__init__(replica)
        self._prefill = prefill

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {"prefill": await self._prefill.statuses()}


@asynccontextmanager
async def running_engine(
    folder: Path,
    engine_id: str,
    prefill: LocalRemotePool | None = None,
    handoff: HandoffConfig | None = None,
    *,
    enable_lora: bool = False,
) -> AsyncGenerator[tuple[EngineServer, EngineReplica]]:
    """An engine in a thread, and what controls it."""
    replica = EngineReplica("127.0.0.1", peers=None if prefill is None else {"prefill": prefill})
    config = EngineConfig(
        model=str(folder),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=512,
        max_num_seqs=MAX_NUM_SEQS,
        num_threads=1,
        handoff=handoff,
        enable_lora=enable_lora,
    )
    engine = await asyncio.to_thread(EngineServer, config, engine_id=engine_id, status_to=replica.status_to)
    thread = threading.Thread(target=engine.run)
    thread.start()
    replica.connect(engine.address)
    task = asyncio.create_task(replica.run())
    try:
        await until(lambda: _has_reported(replica))
        yield engine, replica
    finally:
        engine.stop()
        await asyncio.to_thread(thread.join)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _has_reported(replica: EngineReplica) -> bool:
    try:
        replica.status()
    except EngineUnavailable:
        return False
    return True


@asynccontextmanager
async def real_api(
    folder: Path,
    tracing: Tracing | None = None,
    info: ModelInfo | None = None,
    auth: AuthConfig = AuthConfig(),  # noqa: B008  frozen
) -> AsyncGenerator[RealApi]:
    """folder: a model, served as `tiny` or as `info` says."""
    adapted = info is not None and "adapters" in info.of
    async with (
        running_engine(folder, "decode-1", enable_lora=adapted) as (engine, replica),
        serving(folder, engine, LocalPool(replica), tracing, info, auth) as client,
    ):
        yield RealApi(client)


@asynccontextmanager
async def real_api_with_prefill(folder: Path, tracing: Tracing | None = None) -> AsyncGenerator[RealApi]:
    """The same, with every prompt computed by a second engine."""
    handoff = partial(HandoffConfig, transport="tcp", policy="always")
    async with running_engine(folder, "prefill-1", handoff=handoff(role="prefill")) as (_, prefill):
        pool = LocalRemotePool(prefill)
        async with (
            running_engine(folder, "decode-1", pool, handoff(role="decode")) as (engine, replica),
            serving(folder, engine, LocalPools(replica, pool), tracing) as client,
        ):
            yield RealApi(client)


@asynccontextmanager
async def serving(
    folder: Path,
    engine: EngineServer,
    pool: EnginePool,
    tracing: Tracing | None,
    info: ModelInfo | None = None,
    auth: AuthConfig = AuthConfig(),  # noqa: B008  frozen
) -> AsyncGenerator[httpx.AsyncClient]:
    """The API on a port of its own, and a client of it."""
    telemetry = Telemetry("ingress-1", tracing)
    channel = TokenChannel("127.0.0.1", telemetry.stats)
    info = info or ModelInfo(
        name="tiny",
        root=str(folder),
        folder=str(folder),
        max_model_len=engine.max_model_len,
        vocab_size=ModelConfig.from_folder(folder).vocab_size,
        default_sampling={},
        request_timeout_s=60.0,
        admission=LIMITS,
        supported_tasks=ModelConfig.from_folder(folder).supported_tasks,
    )
    tokenizer = ChatTokenizer.from_folder(folder, template=info.chat_template)
    images = ImageLoader.from_folder(folder, IMAGES, tokenizer) if has_image_processor(folder) else None
    model = ServedModel(info, tokenizer, pool, channel, telemetry, partial(model_parts, images=images))
    app = http_app({info.name: model}, telemetry, auth)
    web = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    receiving, answering = asyncio.create_task(channel.run()), asyncio.create_task(web.serve())
    try:
        await until(lambda: web.started)
        port = web.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        web.should_exit = True
        await asyncio.wait([answering], timeout=60)
        for task in (receiving, answering):
            task.cancel()
        await asyncio.gather(receiving, answering, return_exceptions=True)
