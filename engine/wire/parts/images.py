"""Images in prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

import msgspec

from engine.wire.block_hash import Place
from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.part_record import PartRecord


class ImageStats(PartRecord, frozen=True):
    """Totals of one engine since its start."""

    part: ClassVar[str] = "images"

    encoded: int
    """Images that the vision encoder has computed."""
    cache_hits: int
    """Times that a step found the embeddings of an image in the cache."""


class SequenceImages(PartRecord, frozen=True, array_like=True):
    """The images of a sequence's prompt, without their pixels."""

    part: ClassVar[str] = "images"

    images: list[MultiModalFeatureSpec]


class ReceivedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image that an encode engine has encoded."""

    mm_hash: bytes
    blocks: list[int]
    """Blocks that hold its embeddings."""
    num_embeds: int


class ImageStep(PartRecord, frozen=True, array_like=True):
    """What a step does with embeddings of images."""

    part: ClassVar[str] = "images"

    encoded: list[MultiModalFeatureSpec]
    """Images that the vision encoder computes before the tokens; their embeddings are then cached."""
    forgotten: list[bytes]
    """Hashes of images whose embeddings are evicted before images are encoded."""
    received: list[ReceivedImage]
    """Images from encode engines to copy into the encoder cache."""

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, encoded=[])


NO_IMAGES = ImageStep([], [], [])


def places_of(images: Iterable[MultiModalFeatureSpec]) -> list[Place]:
    """Return where images are in a prompt: the placeholder tokens of all images are the same."""
    return [(image.mm_position.offset, image.mm_position.end, image.mm_hash) for image in images]
