"""A real HTTP server that answers as the ends of image URLs do, good and bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.engine.multimodal.images import file_of, picture

IMAGE = file_of(picture(40, 24))


@dataclass(slots=True)
class ImageServer:
    url: str = ""
    paths: list[str] = field(default_factory=list)
    """What was asked for."""
    sent: int = 0
    """Bytes of the endless answer."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        match request.path:
            case "/image.png" | "/wrong-type":
                kind = "image/png" if request.path == "/image.png" else "text/html"
                return web.Response(body=IMAGE, content_type=kind)
            case "/page":
                return web.Response(body=b"<html>no image</html>", content_type="image/png")
            case "/empty":
                return web.Response(body=b"", content_type="image/png")
            case "/redirect":
                raise web.HTTPFound(request.query["to"])
            case "/circle":
                raise web.HTTPFound("/circle")
            case "/broken":
                raise web.HTTPInternalServerError
            case "/silent":
                await asyncio.Event().wait()
            case "/endless":
                return await self._endless(request)
            case "/large":
                return web.Response(body=b"x" * 100_000)
        raise web.HTTPNotFound

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)
            self.sent += 10_000


@asynccontextmanager
async def image_server(address: str = "127.0.0.1") -> AsyncGenerator[ImageServer]:
    server = ImageServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        yield server
    finally:
        await runner.cleanup()
