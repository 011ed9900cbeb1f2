"""A server in a process that can be killed: the API over a fake engine, whose tokens are made of the seed."""

from __future__ import annotations

import asyncio
import sys
from string import ascii_lowercase

from deployments.app import http_app
from deployments.storage.config import StoreConfig
from engine.wire.messages import GenerateRequest
from tests.deployments.fake_api import fake_api, tokenizer
from tests.served_app import serve_app

NUM_TOKENS = 120


def text_of_seed(request: GenerateRequest) -> list[int]:
    seed = request.params.seed or 0
    letters = [tokenizer().encode(letter)[0] for letter in ascii_lowercase]
    return [letters[(seed * (i + 1) + i * i) % 26] for i in range(NUM_TOKENS)]


async def serve(url: str) -> None:
    async with fake_api(text_of_seed) as api:
        app = http_app({"fake": api.model}, api.telemetry, store=StoreConfig(url=url))
        await serve_app(app)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
