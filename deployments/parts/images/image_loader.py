"""Loads and processes the images of requests, within a memory limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from deployments.options.images import ImageConfig
from deployments.parts.images.media_connector import MediaConnector
from deployments.parts.images.pixel_memory import PixelMemory
from deployments.parts.images.requested_image import RequestedImage
from engine.errors import InvalidParameter
from engine.model.checkpoint.folder import read_json
from engine.multimodal import image
from engine.multimodal.processor import ImageProcessor, ProcessedImage
from engine.text.chat_tokenizer import ChatTokenizer


class ImageLoader:
    """Loads the images of one model in an ingress."""

    def __init__(self, config: ImageConfig, processor: ImageProcessor):
        self._config, self.processor = config, processor
        self._media = MediaConnector(config)
        self._in_flight = asyncio.Semaphore(config.max_in_flight)
        self.memory = PixelMemory(config.max_processed_bytes)
        # not the event loop's threads: an abandoned request leaves its thread working, and each thread keeps freed
        # memory
        self._threads = ThreadPoolExecutor(config.max_processing, "images")

    @classmethod
    def from_folder(cls, folder: Path, config: ImageConfig, tokenizer: ChatTokenizer) -> ImageLoader:
        """Raises ModelFolderError."""
        return cls(config, ImageProcessor.from_folder(folder, read_json(folder, "config.json"), tokenizer))

    @property
    def refuses_all(self) -> bool:
        return not self._config.max_per_request

    async def load(self, images: Sequence[RequestedImage]) -> list[ProcessedImage]:
        """Return the images in order. Raises RequestError for the first that fails, and then loads no others."""
        if len(images) > self._config.max_per_request:
            limit = (
                f"a conversation with at most {self._config.max_per_request} images (ingress.images.max_per_request)"
            )
            raise InvalidParameter("messages", len(images), limit)
        async with self.memory.reserve(len(images) * self.processor.max_bytes):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._load(requested)) for requested in images]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            found = [task.result() for task in tasks]
            for processed in found:
                self.memory.hold(processed)
        return found

    async def _load(self, requested: RequestedImage) -> ProcessedImage:
        async with self._in_flight:
            files = [await self._media.load(requested.url, requested.field)]
            call = partial(self._process, files, requested.field, requested.low_detail)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
            finally:
                files.clear()  # the queued call of an abandoned request would keep them until a thread takes it

    def _process(self, files: list[bytes], field: str, low_detail: bool) -> ProcessedImage:
        """Process one image. files: list with its file, from which the file is removed."""
        return self.processor.process(image.decode(files.pop(), field, self._config.max_pixels, low_detail), field)
