"""A server in a process that can be killed: the API over a fake engine, whose tokens are made of the seed."""

from __future__ import annotations

import asyncio
import signal
import sys
from string import ascii_lowercase

from deployments.app import http_app
from deployments.openai.batches.config import BatchConfig
from deployments.storage.config import StoreConfig
from engine.wire.generate_request import GenerateRequest
from tests.deployments.fake_api import fake_api, tokenizer
from tests.served_app import serve_app

NUM_TOKENS = 120


def letters_of(seed: int, count: int) -> str:
    return "".join(ascii_lowercase[(seed * (i + 1) + i * i) % 26] for i in range(count))


def text_of_seed(request: GenerateRequest) -> list[int]:
    tokens = {letter: tokenizer().encode(letter)[0] for letter in ascii_lowercase}
    return [tokens[letter] for letter in letters_of(request.params.seed or 0, request.params.max_tokens or NUM_TOKENS)]


async def serve(url: str, folder: str | None = None) -> None:
    """SIGUSR1 halts the engine, and SIGUSR2 lets it go on. folder: of batches."""
    async with fake_api(text_of_seed, request_timeout_s=600.0) as api:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, api.engine.paused.set)
        loop.add_signal_handler(signal.SIGUSR2, api.engine.paused.clear)
        batches = BatchConfig(folder=folder, max_in_flight=4)
        app = http_app({"fake": api.model}, api.telemetry, batches=batches, store=StoreConfig(url=url))
        await serve_app(app)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
