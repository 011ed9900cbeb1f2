"""The HTTP API over a real engine, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.openai.served.served_model import ModelInfo
from tests.deployments.real_api import real_api


@contextmanager
def real_server(folder: Path, info: ModelInfo | None = None) -> Iterator[str]:
    """Yield its address. folder: a model, served as `tiny` or as `info` says."""
    urls: list[str] = []
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with real_api(folder, info=info) as api:
            urls.append(f"{api.client.base_url}/")
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield urls[0]
    finally:
        stop.set()
        thread.join()
