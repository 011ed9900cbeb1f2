"""A server of batches in a process that can be killed: the API over a fake engine."""

from __future__ import annotations

import asyncio
import sys

from deployments.app import http_app
from deployments.openai.batches.config import BatchConfig
from tests.deployments.fake_api import fake_api
from tests.served_app import serve_app


async def serve(folder: str) -> None:
    async with fake_api() as api:
        app = http_app({"fake": api.model}, api.telemetry, batches=BatchConfig(folder=folder, max_in_flight=4))
        await serve_app(app)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
