"""The HTTP API over two decode replicas and a prefill replica that do as a test tells them, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio

from deployments.app import http_app
from deployments.frontend.token_channel import TokenChannel
from deployments.http.middleware import AuthConfig
from deployments.observability.telemetry import Telemetry
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.options.console import ConsoleConfig
from deployments.replicas.pools import A, ReplicaQuestion, ReplicaStatus
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.costs import SequenceCost
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats, PeerPool
from engine.wire.token_delta import TokenBatch, TokenDelta, TokenLogprob
from tests.deployments.fake_api import ALL_TASKS, MAX_MODEL_LEN, tokenizer
from tests.deployments.replicas.mortal_pool import LIMITS
from tests.engine_stats import engine_stats

PREFILL = "prefill-m-p1"


@dataclass
class StagedPool:
    """Replicas of one model. A request goes to the first of `decode`; whatever it asks, the answer is `text`."""

    text: str = "An ocean is a very large body of salt water. " * 3
    token_s: float = 0.02
    cost: SequenceCost | None = None  #: of each answer
    decode: list[str] = field(default_factory=lambda: ["decode-m-a1", "decode-m-b2"])
    encode: list[str] = field(default_factory=list)
    handoffs: list[HandoffInfo] = field(default_factory=list)
    received: int = 0
    more_stats: dict[str, Any] = field(default_factory=dict)  #: of the first decode replica
    prompts: list[list[int]] = field(default_factory=list)  #: of all requests
    running: dict[str, str] = field(default_factory=dict)  #: replica by request
    tokens: int = 0

    async def generate(self, request: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        engine = self.decode[0]
        self.prompts.append(list(request.prompt))
        self.running[request.request_id] = engine
        socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
        socket.connect(request.reply_to)
        given = len(request.prompt) - (request.num_prompt or len(request.prompt))
        answer = tokenizer().encode(self.text)[: request.params.max_tokens]
        try:
            for position, token in list(enumerate(answer))[given:]:
                await asyncio.sleep(self.token_s)
                if engine not in self.decode:
                    raise EngineUnavailable("rank 0 died")
                logprobs = None
                if request.params.logprobs is not None:
                    logprobs = [TokenLogprob(token, -0.5, 1, [(token, -0.5), (token + 1, -1.5)])]
                last = position == len(answer) - 1
                delta = TokenDelta(
                    request_id=request.request_id,
                    position=position,
                    token_ids=[token],
                    logprobs=logprobs,
                    finish_reason="length" if last else None,
                )
                if last and self.cost is not None:
                    delta = delta.telling(self.cost)
                batch = TokenBatch(engine_id=engine, commands_to="tcp://127.0.0.1:9", step=position, deltas=[delta])
                await socket.send(msgspec.msgpack.encode(batch))
                self.tokens += 1
        finally:
            del self.running[request.request_id]
            socket.close(linger=100)

    async def statuses(self) -> list[ReplicaStatus]:
        return [self._status(name) for name in self.decode]

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {"prefill": [self._status(PREFILL)], "encode": [self._status(name) for name in self.encode]}

    async def ask(self, question: ReplicaQuestion, kind: type[A], timeout_s: float) -> list[A]:
        return []

    async def asleep(self) -> bool:
        return False

    def _status(self, name: str) -> ReplicaStatus:
        first = name == "decode-m-a1"
        running = sum(engine == name for engine in self.running.values())
        return ReplicaStatus(
            engine_id=name,
            ended=[],
            stats=msgspec.structs.replace(
                _stats(running, self.tokens if first else 0), **(self.more_stats if first else {})
            ),
            last_step_age_s=0.0,
            handoffs=HandoffStats(results={"received": {"": self.received if first else 0}}),
            live_handoffs=self.handoffs if first else [],
        )


def _stats(running: int, tokens: int) -> EngineStats:
    used = 5 * running
    return engine_stats(
        running=running, blocks_total=100, blocks_used=used, blocks_cached=20, blocks_free=80 - used,
        steps=tokens, generation_tokens=tokens, prefix_queried_tokens=100, prefix_hit_tokens=40,
        decode_seconds_per_step=0.004, prompt_seconds_per_token=0.0003,
    )  # fmt: skip


@dataclass
class Stage:
    """What a test holds of a running server."""

    url: str
    pool: StagedPool


@contextmanager
def staged_cluster(name: str = "pocket", auth: AuthConfig = AuthConfig()) -> Iterator[Stage]:  # noqa: B008  frozen
    """Serve a model of that name at a free port. auth: also sets API keys."""
    pool, started, stop = StagedPool(), threading.Event(), threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        telemetry = Telemetry("ingress-1")
        channel = TokenChannel("127.0.0.1", telemetry.stats)
        receiving = asyncio.create_task(channel.run())
        info = ModelInfo(
            name=name,
            root="/models/pocket",
            folder="",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=400,
            default_sampling={},
            request_timeout_s=60.0,
            admission=LIMITS,
            supported_tasks=ALL_TASKS,
        )
        model = ServedModel(info, tokenizer(), pool, channel, telemetry)  # type: ignore[arg-type]  # as much as is asked
        console = ConsoleConfig(configuration={"models": [{"name": name}], "ingress": {"max_replays": 3}})
        app = http_app({name: model}, telemetry, auth, console=console)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        ports.append(server.servers[0].sockets[0].getsockname()[1])
        started.set()
        await asyncio.to_thread(stop.wait)
        server.should_exit = True
        await serving
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield Stage(f"http://127.0.0.1:{ports[0]}/", pool)
    finally:
        stop.set()
        thread.join()
