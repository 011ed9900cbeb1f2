"""The HTTP API over a fake engine, in one process and without Ray."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from fastapi import FastAPI

from deployments.app import http_app
from deployments.frontend.admission import AdmissionLimits
from deployments.frontend.token_channel import TokenChannel
from deployments.http.middleware import AuthConfig
from deployments.observability.telemetry import Telemetry
from deployments.observability.tracing import Tracing
from deployments.openai.batches.config import BatchConfig
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.parts.table import model_parts
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.pools import A, ReplicaQuestion, ReplicaStatus
from deployments.replicas.replica_part import ReplicaPart
from deployments.routing.choice_observer import ChoiceObserver
from deployments.storage.config import StoreConfig
from engine.errors import EngineUnavailable
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Command, Question
from engine.wire.parts.pooling import SupportedTasks
from engine.wire.stats.handoff_stats import PeerPool
from tests.fake_engine import POLL_MS, FakeEngine, Script
from tests.models import make_tokenizer

if TYPE_CHECKING:
    from deployments.parts.images.image_loader import ImageLoader

MAX_MODEL_LEN = 512
ALL_TASKS = SupportedTasks(
    names=("generate", "embed", "classify", "score"),
    embedding_size=4,
    score_token_ids=(5, 6),
    labels=("a", "b", "c", "d"),
)


@cache
def tokenizer() -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save_pretrained(folder)
        return ChatTokenizer.from_folder(Path(folder))


class LocalPool:
    """An EnginePool of one replica in this process.

    sleeps: what it says of a replica that is not there. parts: of the replica.
    """

    def __init__(self, replica: EngineReplica):
        self.sleeps = False
        self.parts: list[ReplicaPart] = []
        self.observer = ChoiceObserver()
        self._replica = replica

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        await self._replica.run_requests([EncodedRequest.of(request) for request in requests])

    async def statuses(self) -> list[ReplicaStatus]:
        return [self._replica.status()]

    async def asleep(self) -> bool:
        return self.sleeps

    async def ask_one(self, question: Question, kind: type[A], adapter: str = "") -> list[A]:
        return [msgspec.msgpack.decode(await self._replica.ask(question), type=kind)]

    async def tell(self, command: Command, peers: bool = False) -> None:
        self._replica.tell(command)

    async def ask(self, question: Question | ReplicaQuestion, kind: type[A], timeout_s: float) -> list[A]:
        assert isinstance(question, ReplicaQuestion)
        answers = [await part.answer(question) for part in self.parts]
        return [answer for answer in answers if answer is not None]

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}


@dataclass(slots=True)
class FakeApi:
    app: FastAPI
    client: httpx.AsyncClient
    model: ServedModel
    engine: FakeEngine
    replica: EngineReplica
    channel: TokenChannel
    telemetry: Telemetry
    pool: LocalPool
    images: ImageLoader | None

    async def post(self, route: str, **body: Any) -> httpx.Response:
        return await self.client.post(f"/v1/{route}", json=body)

    async def until_status(self) -> ReplicaStatus:
        """The engine's first status."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return self.replica.status()
                except EngineUnavailable:  # it has just started
                    await asyncio.sleep(0.005)

    async def stream(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """All events but the closing [DONE]."""
        response = await self.post(route, stream=True, **body)
        assert response.status_code == 200, response.text
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]


@asynccontextmanager
async def fake_api(
    script: Script | None = None,
    *,
    tracing: Tracing | None = None,
    auth: AuthConfig = AuthConfig(),  # noqa: B008  frozen
    batches: BatchConfig = BatchConfig(),  # noqa: B008  frozen
    store: StoreConfig = StoreConfig(),  # noqa: B008  frozen
    names: tuple[str, ...] = ("fake",),
    text_model: ChatTokenizer | None = None,
    keeps_texts: bool = False,
    images: ImageLoader | None = None,
    step_ms: int = POLL_MS,
    **info: Any,
) -> AsyncGenerator[FakeApi]:
    """script, step_ms: see FakeEngine. names: of the models, all on one engine. text_model: their tokenizer.
    images: loads theirs; None if they read text only.

    info: fields of ModelInfo, or of its admission.
    """
    telemetry = Telemetry("ingress-1", tracing, keeps_texts=keeps_texts)
    channel, replica = TokenChannel("127.0.0.1", telemetry.stats), EngineReplica("127.0.0.1")
    tasks = [asyncio.create_task(channel.run()), asyncio.create_task(replica.run())]
    engine = FakeEngine(replica.status_to, script, step_ms)
    replica.connect(engine.address)
    await asyncio.sleep(0)  # only what has begun closes its sockets when it is cancelled
    fields = {"max_model_len": MAX_MODEL_LEN, "vocab_size": 400, "default_sampling": {}, "request_timeout_s": 60.0,
              "supported_tasks": ALL_TASKS}  # fmt: skip
    limits = {"max_num_seqs": 64, "num_engines": 1, "num_ingresses": 1, "max_waiting": 64, "max_waiting_tokens": 10_000}
    admission = AdmissionLimits(**{**limits, **{key: info.pop(key) for key in limits if key in info}})
    models, pool = {}, LocalPool(replica)
    for name in names:
        model_info = ModelInfo(name=name, root=name, folder="", admission=admission, **{**fields, **info})
        parts = text_model or tokenizer(), pool, channel, telemetry
        models[name] = ServedModel(model_info, *parts, partial(model_parts, images=images))
    model = models[names[0]]
    app = http_app(models, telemetry, auth, batches, store)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://fake") as client,
        ):
            yield FakeApi(app, client, model, engine, replica, channel, telemetry, pool, images)
    finally:
        engine.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait for something that another thread makes true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def says(text: str) -> Script:
    """A script that answers every request with `text`."""
    return lambda request: tokenizer().encode(text)
