"""Three ways to stream 64 answers over HTTP: applications for `python -m benchmarks.http`, which measures their cost.

All of them send each stream a token per tick, so only the way to the client differs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import zmq
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from cluster.app import ingress
from cluster.config.app_config import AppConfig
from cluster.model_info import model_info
from deployments import ray_compat
from deployments.replicas.encoded_request import EncodedRequest
from deployments.routing.routing_context import RoutingContext
from engine.distributed.sockets import PushSockets
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add, EngineStatus
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenBatch, TokenDelta

TICK_S = 0.02
TOKEN = 300  # of the bundled model; some word
MANY = 1024


def event(index: int) -> bytes:
    """Return an event of a bare server for one token, as large as a chunk of a completion."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
    chunk = {"id": f"cmpl-{index:036d}", "created": 0, "model": "pocket", "choices": [choice]}
    return b"data: " + json.dumps(chunk | {"object": "text_completion"}).encode() + b"\n\n"


async def ticks(count: int) -> AsyncGenerator[bytes]:
    """Yield one event per tick."""
    due = time.monotonic()
    for index in range(count):
        due += TICK_S
        await asyncio.sleep(due - time.monotonic())
        yield event(index)
    yield b"data: [DONE]\n\n"


bare = FastAPI()


@bare.post("/v1/completions")
async def complete(request: Request) -> StreamingResponse:
    """Stream an answer; uvicorn runs this without Serve."""
    return StreamingResponse(ticks((await request.json())["max_tokens"]), media_type="text/event-stream")


@bare.get("/health")
async def health() -> dict[str, str]:
    return {}


# -- Serve as its documentation shows it ---------------------------------------------------------------------


class Backend:
    async def stream(self, count: int) -> AsyncGenerator[bytes]:
        async for chunk in ticks(count):
            yield chunk


class Frontend:
    def __init__(self, backend: DeploymentHandle):
        self._backend = backend.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse | str:
        if request.method == "GET":
            return "healthy"
        chunks = self._backend.stream.remote((await request.json())["max_tokens"])
        return StreamingResponse(chunks, media_type="text/event-stream")


def plain(args: dict[str, Any]) -> Application:
    """Return an application behind Serve's proxy that streams answers through a deployment handle."""
    backend = serve.deployment(Backend, name="backend", max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0.1})
    options = {"name": "frontend", "max_ongoing_requests": MANY, "ray_actor_options": {"num_cpus": 0.1}}
    return serve.deployment(Frontend, **options).bind(backend.bind())


# -- Manta's own way, with a clock in place of the engine ------------------------------------------------------


class Clock:
    """Answers as a Decode replica and its engine do: one open call per request, one message per tick and ingress."""

    def __init__(self) -> None:
        self._ingresses = PushSockets(zmq.Context(), key=ray_compat.cluster_key())
        self._left: dict[str, tuple[GenerateRequest, int]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def generate(self, requests: list[EncodedRequest], _: RoutingContext) -> None:
        for request in requests:
            message = msgspec.msgpack.decode(request.start, type=Add).request
            self._left[message.request_id] = (message, message.params.max_tokens or 1)
            self._ended[message.request_id] = asyncio.get_running_loop().create_future()
        self._task = self._task or asyncio.create_task(self._run())
        await asyncio.gather(*(self._ended[request.request_id] for request in requests))

    async def status(self) -> bytes:
        stats = EngineStats(
            running=len(self._left), waiting=0, steps=0, preemptions=0, prompt_tokens=0, generation_tokens=0,
            blocks_total=MANY, blocks_free=MANY, blocks_cached=0, blocks_used=0, block_size=16,
            prefix_queried_tokens=0, prefix_hit_tokens=0, finished={},
        )  # fmt: skip
        return msgspec.msgpack.encode(EngineStatus(engine_id="clock", ended=[], stats=stats, last_step_age_s=0.0))

    async def _run(self) -> None:
        due, step = time.monotonic(), 0
        while True:
            due, step = due + TICK_S, step + 1
            await asyncio.sleep(due - time.monotonic())
            batches: dict[str, list[TokenDelta]] = {}
            for request_id, (message, left) in list(self._left.items()):
                last = left == 1
                delta = TokenDelta(
                    request_id=request_id,
                    position=(message.params.max_tokens or 1) - left,
                    token_ids=[TOKEN],
                    finish_reason="length" if last else None,
                )
                batches.setdefault(message.reply_to, []).append(delta)
                self._left[request_id] = (message, left - 1)
                if last:
                    del self._left[request_id]
                    self._ended.pop(request_id).set_result(None)
            for address, deltas in batches.items():
                batch = TokenBatch(engine_id="clock", commands_to="", step=step, deltas=deltas)
                self._ingresses.send(address, msgspec.msgpack.encode(batch))


def manta(args: dict[str, Any]) -> Application:
    config = AppConfig.parse({"models": [{"name": "pocket", "model": "pocket"}]})
    clock = serve.deployment(Clock, name="clock", max_ongoing_requests=MANY, ray_actor_options={"num_cpus": 0.1})
    return ingress(config, [model_info(config.models[0], config.ingress)], [(clock.bind(), {})])
