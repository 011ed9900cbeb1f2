"""An application that is served in a process of its own, which can be killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

import uvicorn
from fastapi import FastAPI

from tests.processes import started


async def serve_app(app: FastAPI) -> None:
    """On any port, which is printed."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving


@contextmanager
def served_app(module: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[tuple[Popen[str], str]]:
    """A process whose module calls `serve_app`, and its URL. prefix: a program that runs the command."""
    with started([*prefix, sys.executable, "-m", module, *arguments], stdout=PIPE) as process:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
