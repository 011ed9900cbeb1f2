"""Work for a client that may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientDisconnect, and cancels the work, as soon as the client is gone.

    Servers only tell an application that asks. The body must have been read before.
    """
    work_task, disconnect_task = asyncio.create_task(work), asyncio.create_task(_until_disconnect(request))
    try:
        await asyncio.wait([work_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        return work_task.result()
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.gather(work_task, return_exceptions=True)


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
