"""Embeddings of images on a rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.models.llama import Model
from engine.model.transformers_backend.example_image import example_image
from engine.wire.parts.images import ImageStep, MultiModalFeatureSpec

if TYPE_CHECKING:  # it takes seconds
    from engine.model.transformers_backend.vision import VisionEncoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows of a step whose token embeddings are replaced by embeddings of images."""

    rows: Tensor  #: [n] int64
    parts: list[tuple[bytes, int, int]]  #: hash of an image, and the range [first, stop) of its embeddings


class EncoderCache:
    """Embeddings of images on the device, by hash. Rank 0's EncoderCacheManager decides which are kept."""

    def __init__(self, model: Model, cfg: ModelConfig, dtype: torch.dtype, *, together: bool):
        """together: whether images of a step that `go_together` are encoded by one call. The last bits of an image's
        embeddings then depend on the other images, as they do on a GPU anyway."""
        vision = vision_encoder(model)
        assert vision is not None and cfg.vision is not None
        self._device = vision.device
        self._vision, self._hidden_size, self._dtype, self._cfg = vision, cfg.hidden_size, dtype, cfg.vision
        self._width = cfg.hidden_size * (1 + cfg.vision.deepstack)
        self.embedding_bytes = self._width * dtype.itemsize
        self._together = together
        self._embeddings: dict[bytes, Tensor] = {}

    def update(self, step: ImageStep, inbox: Tensor | None, blocks: list[Tensor]) -> None:
        """Drop, receive and compute embeddings as a step says. inbox: [blocks, layers, 2, 1, block_size, hidden / 2],
        memory into which embeddings from encode engines are read. blocks: for each received image, [n] int64, its
        blocks in `inbox`."""
        for mm_hash in step.forgotten:
            del self._embeddings[mm_hash]
        for received, index in zip(step.received, blocks, strict=True):
            assert inbox is not None
            rows = inbox[index].permute(0, 4, 1, 2, 3, 5).reshape(-1, self._width)
            self._embeddings[received.mm_hash] = rows[: received.num_embeds]
        for images in self._calls(step.encoded):
            self._embeddings |= self._encode(images)

    def _calls(self, images: list[MultiModalFeatureSpec]) -> list[list[MultiModalFeatureSpec]]:
        """Divide images into groups, each of which one call of the encoder computes."""
        calls: list[list[MultiModalFeatureSpec]] = []
        for image in images:
            if calls and self._together and self._vision.go_together(calls[-1][0].data, image.data):
                calls[-1].append(image)
            else:
                calls.append([image])
        return calls

    def rows(self, needed: EmbeddingRows) -> tuple[Tensor, ...]:
        """Return the embeddings [n, hidden] of these rows, and as much for each deepstack level."""
        found = torch.cat([self._embeddings[mm_hash][first:stop] for mm_hash, first, stop in needed.parts])
        return found.split(self._hidden_size, dim=1)

    def encode_example(self, num_embeds: int) -> None:
        """Encode a black image with about `num_embeds` embeddings, and drop it."""
        self._encode([example_image(self._cfg, num_embeds)])

    def _encode(self, images: list[MultiModalFeatureSpec]) -> dict[bytes, Tensor]:
        """Return the embeddings of each image by its hash, computed by one call."""
        sizes = [image.num_embeds for image in images]
        shape = sum(sizes), self._width
        try:
            found = self._vision(*(image.data for image in images))
            if found.shape == shape:
                parts = found.split(sizes)
                if len(parts) > 1:  # each in its own memory, which goes with its image
                    parts = tuple(part.clone() for part in parts)
                return dict(zip((image.mm_hash for image in images), parts, strict=True))
            problem = f"the encoder made {list(found.shape)} of it, not {list(shape)}"
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            problem = f"{type(error).__name__}: {error}"
        if len(images) > 1:  # each by itself, so that only requests with a broken image end
            return {mm_hash: rows for image in images for mm_hash, rows in self._encode([image]).items()}
        # NaN ends the requests with this image, and no others
        logger.error("an image cannot be encoded mm_hash=%s: %s", images[0].mm_hash.hex(), problem)
        return {images[0].mm_hash: torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)}


def vision_encoder(model: Model) -> VisionEncoder | None:
    """Return a model's vision encoder; None if it has none here."""
    return getattr(model, "vision", None)
