"""Reads the header of a safetensors file, which anybody may have written, without torch and without its data.

The format: https://huggingface.co/docs/safetensors. The package of that name checks headers too, as it opens a file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

MAX_BYTES = 100_000_000  # as in the package safetensors
MAX_DIMS = 32
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "C64": 64, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip

Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorHeader(msgspec.Struct, frozen=True):
    """A tensor of a file. data_offsets: its first byte and the one behind its last, counted from the header's end."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


def header_length(file: Path) -> int:
    """Return the bytes of the header, which follow the file's first eight. Raises OSError, or ValueError that says what
    is wrong with the file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    most = min(MAX_BYTES, file.stat().st_size - 8)
    if length > most:
        raise ValueError(f"{file.name}: the length of the header must be at most {max(0, most):,}, got {length:,}")
    return length


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a file by name. Raises OSError, or ValueError that names the tensor and what is wrong."""
    length = header_length(file)
    with file.open("rb") as stream:
        stream.seek(8)
        text = stream.read(length)
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(part, type=TensorHeader) for name, part in parts.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{file.name}: the header cannot be read: {error}") from None
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        first, stop = tensor.data_offsets
        if tensor.dtype not in BITS:
            raise ValueError(f"{file.name}: {name}.dtype must be one of {', '.join(BITS)}, got {tensor.dtype[:50]!r}")
        if len(tensor.shape) > MAX_DIMS:
            raise ValueError(f"{file.name}: {name}.shape must have at most {MAX_DIMS} sizes, got {len(tensor.shape)}")
        size = math.prod(tensor.shape) * BITS[tensor.dtype]
        if size != 8 * (stop - first) or first != end:
            limit = f"{-(-size // 8)} bytes from {end}, by its shape and dtype, and where the tensor before it ends"
            raise ValueError(f"{file.name}: {name}.data_offsets must be {limit}, got {first} to {stop}")
        end = stop
    if end != (data := file.stat().st_size - 8 - length):
        raise ValueError(f"{file.name}: its tensors must be {data:,} bytes together, as in the file, got {end:,}")
    return tensors
