"""Limits the memory of processed images in one ingress."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from engine.multimodal.processor import ProcessedImage


class PixelMemory:
    """Counts the bytes of processed images, from before they are made until nothing refers to them. An image is kept
    until its answer has ended, because a request that loses its engine is sent again with its images."""

    def __init__(self, size: int):
        """size: limit in bytes. A request that needs more is admitted alone."""
        self.used = 0
        self._size = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncGenerator[None]:
        """Wait for this many bytes, first come, first served, and release them at the end."""
        if self._waiting or not self._fits(size):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._free(size)
                raise
        else:
            self.used += size
        try:
            yield
        finally:
            self._free(size)

    def hold(self, image: ProcessedImage) -> None:
        """Count an image for as long as its pixels are referenced."""
        pixels = image.data["pixel_values"]
        self.used += len(pixels.data)
        loop = asyncio.get_running_loop()
        # the last reference may go in another thread, or after the loop
        finalizer = weakref.finalize(pixels, _call_in, loop, self._free, len(pixels.data))
        finalizer.atexit = False

    def _fits(self, size: int) -> bool:
        return self.used + size <= self._size or not self.used

    def _free(self, size: int) -> None:
        self.used -= size
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            needed, turn = self._waiting.popleft()
            if not turn.done():
                self.used += needed
                turn.set_result(None)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[int], None], size: int) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, size)
