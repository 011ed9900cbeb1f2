"""A server of batches in a process that can be killed: the API over a fake engine.

Its arguments are a folder, and the API keys that it takes.
"""

from __future__ import annotations

import asyncio
import sys

from deployments.app import http_app
from deployments.frontend.api_keys import key_line
from deployments.http.middleware import AuthConfig
from deployments.openai.batches.config import BatchConfig
from tests.deployments.fake_api import fake_api
from tests.served_app import serve_app


async def serve(folder: str, keys: tuple[str, ...]) -> None:
    async with fake_api(max_num_seqs=4, max_waiting=1024) as api:
        auth = AuthConfig(api_keys=tuple(key_line(key, key) for key in keys))
        app = http_app({"fake": api.model}, api.telemetry, auth, BatchConfig(folder=folder, max_in_flight=4))
        await serve_app(app)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], tuple(sys.argv[2:])))
