"""Ingress deployment: the HTTP APIs on Serve."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments import ray_compat
from deployments.app import http_app
from deployments.drain.orphaned_node import end_orphaned_node
from deployments.frontend.token_channel import TokenChannel
from deployments.http import in_process
from deployments.http.middleware import AuthConfig
from deployments.observability.telemetry import NoPeers, Telemetry
from deployments.observability.totals import TotalsLog
from deployments.observability.tracing import Tracing, TracingConfig
from deployments.openai.batches.config import BatchConfig
from deployments.openai.served.served_model import ModelInfo, ServedModel
from deployments.options.console import ConsoleConfig
from deployments.options.images import ImageConfig
from deployments.parts.table import model_parts, open_images
from deployments.poison.named import Named
from deployments.replicas.scaling_report import ScalingChange, queue_report
from deployments.replicas.serve_pool import ServePool
from deployments.storage.config import StoreConfig
from engine.errors import ServingError, StartupError
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.stats.handoff_stats import PeerPool
from placement.console_log import LogConfig, log_to_console

logger = logging.getLogger(__name__)

T = TypeVar("T")
PEERS_TIMEOUT_S = 3.0
READY_INTERVAL_S = 0.5  # between checks whether a request would be answered
READY_TIMEOUT_S = 5.0  # of each check


class IngressPeers(NoPeers):
    """All ingresses of the application. Those that do not answer in time are left out."""

    async def ask(self, what: str, kind: type[T], *args: str) -> list[T]:
        return [msgspec.msgpack.decode(answer, type=kind) for answer in await self._call("report", what, *args)]

    async def scaling_changes(self) -> list[ScalingChange]:
        found = await asyncio.to_thread(ray_compat.shared, ray_compat.SCALING_CHANGES)
        return [] if found is None else msgspec.msgpack.decode(found, type=list[ScalingChange])

    async def tell(self, part: str) -> None:
        await self._call("told", part)

    async def refuse(self, model: str, named: Named) -> None:
        """Make all ingresses refuse something with which engines have ended."""
        await self._call("refuse", model, named.digest, named.what)

    async def _call(self, *call: str) -> list[bytes]:
        """Call a method of all ingresses."""
        handle = serve.get_deployment_handle(ray_compat.INGRESS, serve.get_replica_context().app_name)
        answers = await ray_compat.broadcast(handle, call[0], PEERS_TIMEOUT_S, *call[1:])
        found = [answer for answer in answers if isinstance(answer, bytes)]
        if not found:
            logger.warning("no ingress answered within %.0f s when asked for its %s", PEERS_TIMEOUT_S, " ".join(call))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressOptions:
    """What the configuration says of the ingresses of an application."""

    log: LogConfig
    tracing: TracingConfig | None
    auth: AuthConfig
    batches: BatchConfig
    store: StoreConfig
    console: ConsoleConfig
    images: ImageConfig


@serve.ingress()
class Ingress:
    """Serves HTTP. Control calls go to the replicas; tokens arrive from the engines on the token channel."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        infos: list[ModelInfo],
        pools: list[tuple[DeploymentHandle, dict[PeerPool, DeploymentHandle]]],
        options: IngressOptions,
    ):
        """pools: for each model, the handle of its decode replicas, and the handles of the replicas that compute
        prompts or images for them."""
        started = time.monotonic()
        ingress_id = serve.get_replica_context().replica_id.unique_id
        log_to_console(f"ingress-{ingress_id}", options.log)
        traces = None if options.tracing is None else Tracing(options.tracing)
        node = ray.get_runtime_context().get_node_id()
        self._telemetry = Telemetry(ingress_id, traces, IngressPeers(), node=node, keeps_texts=options.console.texts)
        key = await asyncio.to_thread(ray_compat.cluster_key)
        self._channel = TokenChannel(ray.util.get_node_ip_address(), self._telemetry.stats, key)
        engines = [
            ServePool(*handles, info.block_size, info.may_sleep, self._telemetry.timelines.note)
            for info, handles in zip(infos, pools, strict=True)
        ]
        self._telling: set[asyncio.Task[None]] = set()
        self._models = {
            info.name: self._served_model(info, pool, options.images) for info, pool in zip(infos, engines, strict=True)
        }
        for info, pool in zip(infos, engines, strict=True):
            self._telemetry.stats.model(info.name).routing = pool.routing
        auth = replace(options.auth, is_on_loopback=await asyncio.to_thread(ray_compat.is_on_loopback))
        try:
            self._app = http_app(
                self._models,
                self._telemetry,
                auth,
                options.batches,
                options.store,
                options.console,
                serve.get_replica_context().app_name,
            )
        except StartupError as error:
            await asyncio.to_thread(ray_compat.end_serve_run, str(error))
            raise
        tasks = self._channel.run(), self._log_state(auth.has_keys), end_orphaned_node()
        self._tasks = [asyncio.create_task(task) for task in tasks]
        logger.info("ingress ready startup_s=%.1f", time.monotonic() - started)

    def __serve_build_asgi_app__(self) -> FastAPI:  # called by Serve after the constructor
        return self._app

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """Answer a request of another deployment as if it had come over HTTP. Returns the answer's JSON. Raises
        RefusedInProcess. headers: request headers, such as an API key."""
        return await in_process.answer(self._app, path, body, headers or {})

    async def stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> AsyncGenerator[Any]:
        """Yield the JSON of each event of the answer to a body with `stream`. Raises RefusedInProcess."""
        async with aclosing(in_process.events(self._app, path, body, headers or {})) as events:
            async for event in events:
                yield event

    async def report(self, what: str, *args: str) -> bytes:
        """Return one of this ingress's reports to the others (NoPeers.ask), in msgpack."""
        return msgspec.msgpack.encode(self._telemetry.reports[what](*args))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the queue reports of all models. Serve calls it once a second if a model is autoscaled."""
        numbers: dict[str, float] = {}
        for name, model in self._models.items():
            numbers |= queue_report(name, model.admission.num_waiting, model.admission.waiting_tokens)
        return numbers

    async def refuse(self, model: str, digest: str, what: str) -> bytes:
        """Refuse something with which engines have ended, as this or another ingress has noticed. digest, what: as in
        Named."""
        if model in self._models:
            self._models[model].poison.refuse(Named(digest, what), asyncio.get_running_loop().time())
        return b""

    def _tell_others(self, model: str, named: Named) -> None:
        telling = asyncio.create_task(IngressPeers().refuse(model, named))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def told(self, part: str) -> bytes:
        """Note that this part of another ingress has changed what all share. part: name of its folder."""
        self._app.state.parts[part].told()
        return b""

    def _served_model(self, info: ModelInfo, pool: ServePool, images: ImageConfig) -> ServedModel:
        tokenizer = ChatTokenizer.from_folder(Path(info.folder), "generate" in info.supported_tasks, info.chat_template)
        parts = partial(model_parts, images=open_images(info, tokenizer, images))
        model = ServedModel(info, tokenizer, pool, self._channel, self._telemetry, parts)
        model.poison.tell_others = partial(self._tell_others, info.name)
        return model

    async def _log_state(self, needs_key: bool) -> None:
        """Log `ready` once requests can be answered, since `serve run` never reports this. From then on, log totals."""
        while (endpoint := await self._ready_endpoint()) is None:
            await asyncio.sleep(READY_INTERVAL_S)
        seconds = time.time() - endpoint.deployed_at
        task = next(iter(self._models.values())).main_task
        logger.info(
            "ready address=%s models=%s seconds=%.1f task=%s needs_key=%s",
            endpoint.url, ",".join(self._models), seconds, task, needs_key,
        )  # fmt: skip
        await TotalsLog({name: model.pool for name, model in self._models.items()}, self._telemetry).run()

    async def _ready_endpoint(self) -> ray_compat.HttpEndpoint | None:
        try:
            endpoint = await asyncio.to_thread(ray_compat.http_endpoint, serve.get_replica_context().app_name)
            if endpoint.is_local:
                await asyncio.to_thread(_get_health, endpoint.url)
            else:  # the port may be on another node's loopback interface
                await asyncio.gather(*(model.check_health() for model in self._models.values()))
        except (OSError, HTTPException, RayError, RayServeException, ServingError):
            return None
        return endpoint

    async def __del__(self) -> None:
        """Stop the ingress. Serve calls it after the last request, when it removes the replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._telemetry.close)


def _get_health(url: str) -> None:
    """Raise OSError or HTTPException if the application does not answer its health check with 200."""
    # no verification: the certificate is for the name that clients use, not for this address
    unchecked = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), unchecked)
    with direct.open(f"{url}/health", timeout=READY_TIMEOUT_S):
        pass
