"""The HTTP API over a real engine whose model reads images, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deployments.real_api import real_api
from tests.vision_models import make_vision_chat_model


@contextmanager
def seeing_server(folder: Path) -> Iterator[str]:
    """Yield its address. folder: the model is written there."""
    make_vision_chat_model(folder)
    urls: list[str] = []
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with real_api(folder) as api:
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
