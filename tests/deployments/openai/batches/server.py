"""A server of batches in a process that can be killed: the API over a fake engine. Prints its port."""

from __future__ import annotations

import asyncio
import sys

import uvicorn

from deployments.app import http_app
from deployments.openai.batches.config import BatchConfig
from tests.deployments.fake_api import fake_api


async def serve(folder: str) -> None:
    async with fake_api() as api:
        app = http_app({"fake": api.model}, api.telemetry, batches=BatchConfig(folder=folder, max_in_flight=4))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
