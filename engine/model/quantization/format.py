"""Formats of quantized weights: how a checkpoint stores a weight, and how a rank reads its shard of it.

A format names the tensors that replace `weight`, and decodes them into a QuantizedWeight. Each dimension of such a
tensor runs along the weight's outputs or inputs, and one entry may cover several of them. For instance, a scale may
cover 128 columns, or a word eight rows. A rank reads every entry that covers any of its own rows or columns, so a
weight can be split anywhere; the surplus is cut off later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.quantization.weight import QuantizedWeight
from engine.model.shard import INPUTS, OUTPUTS, Shard, Shards


@dataclass(frozen=True, slots=True)
class QuantAxis:
    """A dimension of a stored tensor, along dimension `dim` of the weight. An entry covers `unit` rows or columns."""

    dim: int
    unit: int = 1

    def span(self, weight: Shard) -> tuple[int, int, int]:
        """Return (first, stop, total): entries [first, stop) cover the shard of the weight, out of `total` entries."""
        total = weight.shape[self.dim]
        start, size = (weight.start, weight.size) if self.dim == weight.dim else (0, total)
        if self.dim == 0 and weight.held is not None:
            start, size = weight.held.start, len(weight.held)
        return start // self.unit, -(-(start + size) // self.unit), -(-total // self.unit)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors in which the checkpoint stores a quantized weight."""

    dtype: torch.dtype | None
    """None for the model's dtype, which is torch's default while the model is built."""
    axes: tuple[QuantAxis | int, ...]
    """One per dimension. A plain number is the size of a dimension that every rank reads whole."""

    def allocate(self, weight: Shard) -> tuple[Shard, Tensor]:
        """Return the slice that this rank reads for its shard of the weight, and an empty tensor to read it into."""
        spans = [(0, axis, axis) if isinstance(axis, int) else axis.span(weight) for axis in self.axes]
        target = torch.empty([stop - first for first, stop, _ in spans], dtype=self.dtype)
        axes = enumerate(self.axes)
        dim = next((i for i, axis in axes if isinstance(axis, QuantAxis) and axis.dim == weight.dim), 0)
        first, stop, _ = spans[dim]
        return Shard(tuple(total for _, _, total in spans), dim, first, stop - first, weight.held), target


class WeightFormat(Protocol):
    """A format in which checkpoints store a weight [outputs, inputs]."""

    def stored_tensors(self, weight: Shard) -> dict[str, StoredTensor]:
        """Return the tensors that replace `weight`, by the last part of their names."""

    def decode(self, tensors: dict[str, Tensor], weight: Shard) -> QuantizedWeight:
        """Return this rank's shard of the weight. tensors: its `stored_tensors`, as this rank has read them."""


class StoredWeight:
    """This rank's shards of weights that are merged into one layer, in the checkpoint's format until decoded."""

    def __init__(self, weights: dict[str, Shard], format: WeightFormat):
        self.weights, self.format = weights, format
        self.tensors: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
        self.shards: Shards = {}
        for name, weight in weights.items():
            for ending, stored in format.stored_tensors(weight).items():
                shard, target = stored.allocate(weight)
                self.tensors[name][ending] = target
                self.shards[f"{name}.{ending}".removeprefix(".")] = shard, target

    @property
    def numel(self) -> int:
        """Number of weights. In the checkpoint, a number may pack several of them."""
        return sum(math.prod(weight.local_shape) for weight in self.weights.values())

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for _, target in self.shards.values())

    def decode(self) -> QuantizedWeight:
        """Decode the weights and stack them along the outputs."""
        return QuantizedWeight.cat(
            [self.format.decode(self.tensors[name], weight) for name, weight in self.weights.items()]
        )


def trim(values: Tensor, dim: int, weight: Shard, axis: QuantAxis) -> Tensor:
    """Cut unpacked `values` to the shard along `dim`, since the first and last entries may cover rows or columns
    outside the shard."""
    first, _, _ = axis.span(weight)
    start = weight.start - first * axis.unit if axis.dim == weight.dim else 0
    return values.narrow(dim, start, weight.local_shape[axis.dim])


def per_row(entries: Tensor, weight: Shard, unit: int) -> Tensor:
    """Repeat entries for `unit` rows each: [entries, ...] -> [rows of the shard, ...]."""
    if unit == 1:
        return entries
    return trim(entries.repeat_interleave(unit, dim=0), 0, weight, QuantAxis(OUTPUTS, unit))


def per_group(entries: Tensor, weight: Shard, unit: int, order: Tensor | None = None) -> Tensor:
    """Arrange entries for `unit` columns each as groups of equal size: [rows, entries] -> [rows, groups]. Where the
    shard's groups differ in size, each column becomes a group.

    order: [columns], the entry of each column; None if columns are in order.
    """
    groups, columns = entries.shape[1], weight.local_shape[1]
    if order is None:
        first, _, _ = QuantAxis(INPUTS, unit).span(weight)
        start = weight.start if weight.dim == INPUTS else 0
        order = torch.arange(start, start + columns, device=entries.device) // unit - first
    if columns % groups == 0:
        even = torch.arange(columns, device=entries.device) // (columns // groups)
        if torch.equal(order.long(), even):
            return entries
    return entries[:, order.long()]
