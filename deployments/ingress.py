"""The ingress deployment: the OpenAI API on Serve."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.engine_pool import ServePool
from deployments.openai.app import openai_app
from deployments.openai.served_model import ModelInfo, ServedModel
from deployments.token_channel import TokenChannel
from engine.tokenizer import Tokenizer
from placement.console_log import log_to_console

logger = logging.getLogger(__name__)


@serve.ingress()
class Ingress:
    """Text on one side, tokens on the other: control calls go to the replicas, tokens come by the channel."""

    async def __init__(self, infos: list[ModelInfo], handles: list[DeploymentHandle]):  # type: ignore[misc]
        started = time.monotonic()
        log_to_console("ingress")
        self._channel = TokenChannel(ray.util.get_node_ip_address())
        self._models = {
            info.name: ServedModel(info, Tokenizer.from_folder(Path(info.folder)), ServePool(handle), self._channel)
            for info, handle in zip(infos, handles, strict=True)
        }
        self._task = asyncio.create_task(self._channel.run())
        logger.info("ingress ready startup_s=%.1f", time.monotonic() - started)

    def __serve_build_asgi_app__(self) -> FastAPI:  # called by Serve after the constructor
        return openai_app(self._models, self._channel)

    async def __del__(self) -> None:
        """Serve calls this after the last request, when it removes the replica."""
        self._task.cancel()
