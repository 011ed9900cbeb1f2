"""How a checkpoint stores one quantized weight, and how a rank reads its part of it.

A format names the tensors that stand in place of `weight`, and makes a QuantizedWeight of them. The dimensions of each
tensor run along the weight's outputs or inputs in units: a scale for 128 columns, a word of eight rows. A rank reads
every entry that its own rows or columns touch, so any split over ranks works; what it reads too much is cut off later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import Shard

OUTPUTS, INPUTS = 0, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a weight [outputs, inputs]: rows or columns (`dim`) [start, start + size)."""

    outputs: int
    inputs: int
    dim: int
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.size, self.inputs) if self.dim == OUTPUTS else (self.outputs, self.size)

    def shard(self, target: Tensor) -> Shard:
        """Of a weight that is stored as it is."""
        return Shard(target, (self.outputs, self.inputs), self.dim, self.start)

    def span(self, along: int, unit: int) -> tuple[int, int, int]:
        """Entries [first, stop) of `unit` rows or columns each that this piece touches, and how many there are."""
        total = (self.outputs, self.inputs)[along]
        start, size = (self.start, self.size) if along == self.dim else (0, total)
        return start // unit, -(-(start + size) // unit), -(-total // unit)


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a stored tensor: along the weight's outputs or inputs, `unit` of them to an entry."""

    along: int
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Field:
    """A stored tensor. axes: of each dimension its size, or what it runs along."""

    dtype: torch.dtype
    axes: tuple[Axis | int, ...]

    def allocate(self, piece: Piece) -> tuple[Tensor, Shard]:
        """Room for what `piece` needs of it, and where that is in the checkpoint."""
        spans = [(0, axis, axis) if isinstance(axis, int) else piece.span(axis.along, axis.unit) for axis in self.axes]
        target = torch.empty([stop - first for first, stop, _ in spans], dtype=self.dtype)
        axes = enumerate(self.axes)
        split = next((i for i, axis in axes if isinstance(axis, Axis) and axis.along == piece.dim), 0)
        return target, Shard(target, tuple(total for _, _, total in spans), split, spans[split][0])


class WeightFormat(Protocol):
    def fields(self, piece: Piece) -> dict[str, Field]:
        """The stored tensors by their names' endings, in place of `weight`."""

    def decode(self, tensors: dict[str, Tensor], piece: Piece) -> QuantizedWeight:
        """tensors: what `fields` asked for, for this piece alone."""


class StoredWeight:
    """Weights of one format as they lie in the checkpoint, this rank's pieces of them, until they are decoded."""

    def __init__(self, pieces: dict[str, Piece], format: WeightFormat):
        self.pieces, self.format = pieces, format
        self.tensors: dict[str, dict[str, Tensor]] = {}
        self.shards: dict[str, Shard] = {}  # by the tensor's name, relative to the layer
        for name, piece in pieces.items():
            self.tensors[name] = {}
            for ending, field in format.fields(piece).items():
                target, shard = field.allocate(piece)
                self.tensors[name][ending] = target
                self.shards[f"{name}.{ending}".removeprefix(".")] = shard

    @property
    def numel(self) -> int:
        """Of the weights, not of what they are stored in."""
        return sum(math.prod(piece.shape) for piece in self.pieces.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())

    def decode(self) -> QuantizedWeight:
        """The pieces one below the other."""
        return QuantizedWeight.cat(
            [self.format.decode(self.tensors[name], piece) for name, piece in self.pieces.items()]
        )


def cut(values: Tensor, dim: int, piece: Piece, along: int, unit: int) -> Tensor:
    """Of unpacked values, those of the piece: the first word may have begun before it, and the last go on after it."""
    first, _, _ = piece.span(along, unit)
    start = piece.start - first * unit if along == piece.dim else 0
    return values.narrow(dim, start, piece.shape[along])


def per_row(entries: Tensor, piece: Piece, unit: int) -> Tensor:
    """[entries of `unit` rows, ...] -> [rows of the piece, ...]"""
    return cut(entries.repeat_interleave(unit, dim=0), 0, piece, OUTPUTS, unit) if unit > 1 else entries


def per_group(entries: Tensor, piece: Piece, unit: int, order: Tensor | None = None) -> Tensor:
    """[rows, entries of `unit` columns] -> [rows, groups], groups of equal size; single columns where they are not.

    order: [columns] the entry of each column, where that is not simply one after the other.
    """
    groups, columns = entries.shape[1], piece.shape[1]
    if order is None:
        first, _, _ = piece.span(INPUTS, unit)
        start = piece.start if piece.dim == INPUTS else 0
        order = torch.arange(start, start + columns, device=entries.device) // unit - first
    if columns % groups == 0:
        even = torch.arange(columns, device=entries.device) // (columns // groups)
        if torch.equal(order.long(), even):
            return entries
    return entries[:, order.long()]
