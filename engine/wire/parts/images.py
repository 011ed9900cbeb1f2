"""Images in prompts. Names of what is sent to an engine are those of vLLM's `MultiModalFeatureSpec`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import ClassVar, Self

import msgspec
import numpy as np

from engine.wire.block_hash import Place
from engine.wire.part_record import Asking, PartRecord

MM_HASH_BYTES = 16


class TensorData(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A numpy array in transit."""

    dtype: str
    """Name of a numpy dtype, such as `float32`."""
    shape: tuple[int, ...]
    data: bytes
    """Elements in row-major order, little endian."""

    @classmethod
    def of(cls, array: np.ndarray) -> TensorData:
        return cls(array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())

    def numpy(self) -> np.ndarray:
        """Return a read-only view of `data`. Raises ValueError if the shape does not fit `data`."""
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class PlaceholderRange(msgspec.Struct, frozen=True, array_like=True):
    """Placeholder tokens of one image in a prompt.

    Those with the id `image_token_id` of the model's config.json (`image_token_index` in older ones) are replaced by
    one embedding each, in order. Other tokens among them, such as Pixtral's row ends, are embedded as text.
    """

    offset: int
    """Position of the first placeholder in the prompt's token ids."""
    length: int
    """Number of tokens from the first placeholder to the last, both included."""

    @property
    def end(self) -> int:
        """Position after the last placeholder."""
        return self.offset + self.length


class MultiModalFeatureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt, as the model's image processor prepared it."""

    data: dict[str, TensorData]
    """Arguments of the vision encoder for this image alone, named as transformers' image processors name them:
    `pixel_values` and, by family, `image_grid_thw` [1, 3] (Qwen) or `image_sizes` [1, 2] (Pixtral).

    The pixels are float32, or bytes that index a look-up table: `pixel_table` [3, 256], float32, maps each channel's
    values to rescaled and normalized ones. The dimensions of the pixels after the first are in channel-first order."""
    mm_hash: bytes
    """Hash of `data`, equal for the same picture with the same processing in any prompt."""
    mm_position: PlaceholderRange
    num_embeds: int
    """Number of embeddings that the encoder makes of the image."""

    def without_pixels(self) -> MultiModalFeatureSpec:
        small = {name: tensor for name, tensor in self.data.items() if name not in ("pixel_values", "pixel_table")}
        return msgspec.structs.replace(self, data=small)


class PromptImages(PartRecord, frozen=True, array_like=True):
    """The images of a prompt, in order of position; they do not overlap. Ranks get them without their pixels."""

    part: ClassVar[str] = "images"

    images: list[MultiModalFeatureSpec]

    @classmethod
    def of(cls, images: Iterable[MultiModalFeatureSpec]) -> Self | None:
        """Return the record of these images, or None if there are none."""
        return cls(found) if (found := list(images)) else None

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, images=[])


class ImageStats(PartRecord, frozen=True):
    """Totals of one engine since its start."""

    part: ClassVar[str] = "images"

    encoded: int
    """Images that the vision encoder has computed."""
    cache_hits: int
    """Times that a step found the embeddings of an image in the cache."""


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


def images_in(asked: Asking) -> list[MultiModalFeatureSpec]:
    """Return the images of a request's prompt."""
    return [] if (record := asked.record(PromptImages)) is None else record.images


def mm_hash(data: dict[str, TensorData]) -> bytes:
    """Return a hash of MM_HASH_BYTES over everything that an encoder's output depends on.

    Uses 128 bits of blake2b, like `block_hash`: a collision would show one user's image to another.
    """
    digest = hashlib.blake2b(digest_size=MM_HASH_BYTES, person=b"manta-mm")
    for name, tensor in sorted(data.items()):
        digest.update(
            f"{name} {tensor.dtype} {tensor.shape} ".encode()
        )  # so that different lists of tensors never hash the same bytes
        digest.update(tensor.data)
    return digest.digest()
