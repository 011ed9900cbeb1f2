"""Images in the conversations of one model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import image_parts
from deployments.openai.served.model_part import Draft, ModelPart
from deployments.parts.images.requested_image import RequestedImage
from engine.errors import Described, InvalidParameter, RequestTimeout
from engine.multimodal.invalid_image import InvalidImage
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.images import PromptImages

if TYPE_CHECKING:  # these modules import packages that only models with images need
    from deployments.parts.images.image_loader import ImageLoader
    from engine.multimodal.processor import ProcessedImage


class ImageInputs(ModelPart):
    def __init__(self, model: str, max_model_len: int, loader: ImageLoader | None):
        """model: its name. loader: None if the model reads text only."""
        self._model, self._max_model_len, self._loader = model, max_model_len, loader

    @property
    def input_modalities(self) -> Sequence[str]:
        return () if self._loader is None or self._loader.refuses_all else ("image",)

    async def load(self, draft: Draft) -> None:
        """Raises RequestError, also for a model that reads no images, and RequestTimeout."""
        body = draft.body
        messages = getattr(body, "messages", None) or []
        wanted = [RequestedImage(path, part.url, part.low_detail) for path, part in image_parts(messages)]
        if not wanted:
            return
        if self._loader is None:
            limit = f"text, because model {self._model!r} reads no images"
            raise InvalidImage(wanted[0].field, Described("an image"), limit)
        try:
            async with asyncio.timeout(draft.timeout_s):
                draft.of[self] = await self._loader.load(wanted)
        except TimeoutError:
            raise RequestTimeout(draft.request_id, draft.timeout_s) from None
        if isinstance(body, ChatBody) and body.truncate_prompt_tokens is not None:
            raise InvalidParameter("truncate_prompt_tokens", body.truncate_prompt_tokens, "left out with images")

    def expand(self, draft: Draft, text: str) -> str:
        """Put in the placeholders of the images that the text shows."""
        images: list[ProcessedImage] = draft.of.get(self, [])
        if self._loader is None or not images:
            return text
        processor = self._loader.processor
        shown = images if len(text) == len(draft.text) else images[: processor.num_markers(text)]
        return processor.expand(text, shown, self._max_model_len)

    def requests(self, draft: Draft, requests: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        images: list[ProcessedImage] = draft.of.get(self, [])
        if self._loader is None or not images:
            return requests
        located = PromptImages(self._loader.processor.locate(requests[0][0].prompt, images))
        return [[request.asking(located) for request in sequences] for sequences in requests]
