"""Describes a tensor in a GGUF file: where it is, and how it differs from the same tensor in a checkpoint."""

from __future__ import annotations

import math

import msgspec

# Numbers per block and bytes per block; plain types have blocks of one number.
TYPES = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "MXFP4": (32, 17),
    "Q3_K": (256, 110), "Q2_K": (256, 84), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")


class Runs(msgspec.Struct, frozen=True):
    """The order of rows, columns or blocks in the checkpoint: runs of neighbours in the file."""

    runs: tuple[tuple[int, int], ...]
    """The first position and the length of each run."""

    @property
    def length(self) -> int:
        return sum(count for _, count in self.runs)

    def order(self) -> list[int]:
        """Return the position in the file of each row or column of the checkpoint."""
        return [position for first, count in self.runs for position in range(first, first + count)]

    def in_blocks(self, size: int) -> Runs | None:
        """Return the order of blocks of `size` numbers; None if a run begins or ends inside a block."""
        if any(number % size for run in self.runs for number in run):
            return None
        return Runs(tuple((first // size, count // size) for first, count in self.runs))


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a GGUF file, stored row by row along its last dimension."""

    file: str
    offset: int
    """Position of its first byte in the file."""
    shape: tuple[int, ...]
    type: str
    """A key of TYPES."""
    pairs_of_heads: int = 0
    """Number of heads whose rows alternate between the head's first half and its second, as llama.cpp rotates pairs of
    neighbours; 0 if rows are in the checkpoint's order."""
    rows: Runs | None = None
    """Order of the rows, if the checkpoint has another, or only some of them."""
    columns: Runs | None = None
    negative_exp: bool = False
    """Whether llama.cpp stores -exp(x) for each x of the checkpoint."""
    added: float = 0.0
    """Number that llama.cpp has added to each element."""
    alternate: int | None = None
    """Offset of a tensor of the same shape and type whose rows alternate with these along the second dimension."""
    joined: int | None = None
    """Offset of a tensor of the same shape and type whose rows follow these."""
    transposed: bool = False
    """Whether the checkpoint has the last two dimensions exchanged."""
    values: Entry | None = None
    """For each head, the rows that project to its value [heads, size of a value, rank]. This tensor's are the columns
    that project to its key [heads, rank, size of a key]; the checkpoint has the rows of both, head by head."""
    numbers: tuple[float, ...] | None = None
    """The numbers, if the file has them in its metadata."""

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
        if self.values is not None:
            return shape[0] * (shape[2] + self.values.shape[1]), shape[1]
        if self.rows is not None:
            shape[0] = self.rows.length
        if self.alternate is not None:
            shape[1] *= 2
        if self.joined is not None:
            shape[-2] *= 2
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)
