"""Reads tensors of a GGUF file in the form of a Hugging Face checkpoint. Reads only the part that is indexed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.model.checkpoint.gguf.entry import TYPES, Entry, Runs
from engine.model.quantization.ggml import unpack

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_weights(index: Path) -> GGUFTensors:
    return GGUFTensors(index)


class GGUFTensors:
    """The tensors named by an index, in files next to it; with the interface of `safetensors.safe_open`."""

    def __init__(self, index: Path):
        self._folder = index.parent
        self._entries = msgspec.json.decode(index.read_bytes(), type=dict[str, Entry])
        self._mapped: dict[str, Tensor] = {}

    def __enter__(self) -> GGUFTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mapped.clear()

    def keys(self) -> list[str]:
        return list(self._entries)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> GGUFSlice | MadeTensor:
        entry = self._entries[name]
        if entry.numbers is not None:
            return MadeTensor(entry, lambda: torch.tensor(entry.numbers).view(entry.shape))
        if (values := entry.values) is not None:
            both = [self._stored(replace(entry, values=None)), self._stored(values)]
            return MadeTensor(entry, lambda: torch.cat((both[0][()].mT, both[1][()]), dim=1).flatten(0, 1))
        return self._stored(entry)

    def _stored(self, entry: Entry) -> GGUFSlice:
        if entry.file not in self._mapped:
            # copy-on-write, since torch warns of read-only memory; it is never written
            mapped = np.memmap(self._folder / entry.file, np.uint8, "c")
            self._mapped[entry.file] = torch.from_numpy(mapped)
        return GGUFSlice(self._mapped[entry.file], entry)


class MadeTensor:
    """A tensor that is made of others, in float32. It is made whole whenever a part of it is read."""

    def __init__(self, entry: Entry, make: Callable[[], Tensor]):
        self._entry, self._make = entry, make

    def get_shape(self) -> list[int]:
        return list(self._entry.shape_in_checkpoint)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self._make().float()[index]


class GGUFSlice:
    """A tensor as numbers. Numbers stored in blocks are dequantized to float32."""

    def __init__(self, file: Tensor, entry: Entry):
        self._file, self._entry = file, entry

    def get_shape(self) -> list[int]:
        return list(self._entry.shape_in_checkpoint)

    def get_dtype(self) -> str:
        return self._entry.type

    @property
    def columns_of_blocks(self) -> Runs | None:
        """The order of the columns, counted in blocks."""
        columns = self._entry.columns
        return None if columns is None else columns.in_blocks(TYPES[self._entry.type][0])

    @property
    def blocks(self) -> GGUFBlocks:
        """The tensor as it is stored."""
        return GGUFBlocks(self)

    def __getitem__(self, index: Any) -> Tensor:
        entry = self._entry
        if entry.alternate is None and not entry.transposed:
            index = index if isinstance(index, tuple) else (index,)
            numbers = self._decode(self.rows(*index[:1]))
            if entry.columns is not None:
                numbers = numbers[:, entry.columns.order()]
            return numbers[(slice(None), *index[1:])]
        whole = self._decode(self._stored(entry.offset))
        if entry.alternate is not None:
            whole = torch.stack((whole, self._decode(self._stored(entry.alternate))), dim=2).flatten(1, 2)
        return (whole.mT if entry.transposed else whole)[index]

    def rows(self, index: slice = slice(None)) -> Tensor:
        """Read rows in the checkpoint's order: [..., bytes of a row] uint8."""
        rows = self._stored(self._entry.offset)
        if self._entry.joined is not None:
            rows = torch.cat((rows, self._stored(self._entry.joined)), dim=-2)
        if self._entry.rows is not None:
            return rows[self._entry.rows.order()[index]]
        if not self._entry.pairs_of_heads:
            return rows[index]
        pairs = torch.arange(len(rows)).view(self._entry.pairs_of_heads, -1, 2)
        return rows[pairs.mT.flatten()[index]]

    def _stored(self, offset: int) -> Tensor:
        entry = self._entry
        if len(entry.shape) == 1:  # one row in the file; its numbers are rows of the checkpoint's tensor
            return self._file[offset : offset + entry.nbytes].view(entry.shape[0], -1)
        return self._file[offset : offset + entry.nbytes].view(*entry.shape[:-1], entry.row_bytes)

    def _decode(self, rows: Tensor) -> Tensor:
        entry = self._entry
        if entry.in_blocks:
            blocks = rows.flatten(0, -2).unflatten(-1, (-1, TYPES[entry.type][1]))
            return unpack(blocks, entry.type).dequantize(torch.float32).unflatten(0, rows.shape[:-1])
        numbers = rows.contiguous().view(PLAIN[entry.type])
        numbers = numbers.flatten() if len(entry.shape) == 1 else numbers
        if entry.negative_exp:
            return numbers.neg().log()
        return numbers.float() - entry.added if entry.added else numbers


class GGUFBlocks:
    """A tensor as it is stored: [rows, blocks, bytes of a block] uint8."""

    def __init__(self, tensor: GGUFSlice):
        self._tensor, self._bytes = tensor, TYPES[tensor.get_dtype()][1]

    def get_shape(self) -> list[int]:
        rows, columns = self._tensor.get_shape()
        return [rows, columns // TYPES[self._tensor.get_dtype()][0], self._bytes]

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        blocks = self._tensor.rows(index[0]).unflatten(-1, (-1, self._bytes))
        if (columns := self._tensor.columns_of_blocks) is not None:
            blocks = blocks[:, columns.order()]
        return blocks[(slice(None), *index[1:])]
