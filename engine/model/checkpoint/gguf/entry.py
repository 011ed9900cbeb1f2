"""What is known of a tensor in a GGUF file: where it lies, and how it differs from the one in a checkpoint."""

from __future__ import annotations

import math

import msgspec

# Numbers and bytes of a block; a type of plain numbers has blocks of one.
TYPES = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "MXFP4": (32, 17),
}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, row by row along its last dimension."""

    file: str
    offset: int
    """Of its first byte in the file."""
    shape: tuple[int, ...]
    type: str
    """A key of TYPES."""
    pairs_of_heads: int = 0
    """Heads whose rows llama.cpp has stored in pairs that it rotates, of each the first and the second half's; 0 if the
    rows are in order."""
    added: float = 0.0
    """Has been added to each number."""
    alternate: int | None = None
    """Offset of a tensor of the same kind whose rows, along the second dimension, alternate with these."""
    transposed: bool = False
    """Whether the checkpoint's last two dimensions are the other way round."""

    @property
    def in_blocks(self) -> bool:
        return self.type not in PLAIN

    @property
    def row_bytes(self) -> int:
        numbers, size = TYPES[self.type]
        return self.shape[-1] // numbers * size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def shape_in_checkpoint(self) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.alternate is not None:
            shape[1] *= 2
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)
