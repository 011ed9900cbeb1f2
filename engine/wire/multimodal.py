"""Images of a prompt as they are sent to an engine, named after vLLM's `MultiModalFeatureSpec`."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

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
