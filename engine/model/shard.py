"""How a model is divided over its ranks: the slice of each checkpoint tensor that a rank holds, and the layers that own
such slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError

OUTPUTS, INPUTS = 0, 1  # dimensions of a weight


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What layers know of the ranks that share them, and of what each rank computes. One rank has everything."""

    ranks: TPGroup = field(default_factory=TPGroup.single)
    fixed_order: bool = False  #: whether sums have the same bits with any number of ranks
    parts: int = 1  #: addends of each sum that every rank computes
    vocab_multiple: int = 1  #: divisor of the number of vocabulary rows on a rank

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size


class TensorSlice(Protocol):
    """A tensor on disk of which only the indexed part is read: safetensors' PySafeSlice."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of a tensor that this rank holds: [start, start + size) of dimension `dim`."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    dim: int
    start: int
    size: int
    held: range | None = None
    """Of the first dimension, the part that this rank holds; None for all of it."""

    @classmethod
    def of_rank(cls, shape: tuple[int, ...], dim: int, tp: ShardPlan, what: str) -> Shard:
        """Return this rank's slice of a tensor that is split evenly along `dim`. what: name of the dimension in error
        messages. Raises ConfigError if the dimension cannot be split evenly."""
        size, rest = divmod(shape[dim], tp.size)
        if rest:
            raise ConfigError("tensor_parallel_size", tp.size, f"a divisor of the model's {what} ({shape[dim]})")
        if dim == INPUTS and size % tp.parts:
            limit = f"left out: the model's {what} ({shape[dim]}) is no multiple of {tp.size * tp.parts}"
            raise ConfigError("determinism", "strict", limit)
        return cls(shape, dim, tp.rank * size, size)

    def stacked(self, count: int, held: range | None = None) -> Shard:
        """Return this slice for `count` tensors of the same shape that are stored as one. held: the tensors of which
        this rank holds a slice; None for all."""
        return Shard((count, *self.shape), self.dim + 1, self.start, self.size, held)

    def transposed(self) -> Shard:
        """Return this slice for stacked tensors that are stored with their last two dimensions exchanged."""
        count, outputs, inputs = self.shape
        return replace(self, shape=(count, inputs, outputs), dim={1: 2, 2: 1}.get(self.dim, self.dim))

    @property
    def local_shape(self) -> tuple[int, ...]:
        sizes = [*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :]]
        return tuple(sizes) if self.held is None else (len(self.held), *sizes[1:])

    def load(self, source: TensorSlice, target: Tensor) -> None:
        """Copy the slice into `target`, and convert it to the target's dtype and device."""
        if self.size == 0:  # a rank past the end of an odd vocabulary
            return
        if not source.get_shape():  # a single number, which some tools store without a dimension
            target.fill_(source[()])
            return
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.start, self.start + self.size)
        if self.held is not None:
            index[0] = slice(self.held.start, self.held.stop)
        target.copy_(source[tuple(index)])


Shards = dict[str, tuple[Shard, Tensor]]
"""Checkpoint tensors by name, each with the slice that this rank holds and the tensor it is loaded into. If several
weights are stored as one tensor, each appends a colon and a name of its own."""


class Sharded(nn.Module):
    """A layer that owns weights of the checkpoint, in torch's default dtype and device (set by `build_model`)."""

    quantized_parameters = 0
    """Number of weights that are not held in an nn.Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()

    def shards(self) -> Shards:
        """Return every checkpoint tensor that this layer reads, named relative to the layer; together they fill it."""
        raise NotImplementedError

    def elsewhere(self, names: set[str], name_of: Callable[[str], str]) -> set[str]:
        """Return tensors of this layer that only other ranks hold. names: all tensors of the checkpoint. name_of: gives
        a tensor's name in the checkpoint, from its name in this layer."""
        return set()

    def pack(self) -> None:
        """Convert the loaded weights to the form that the ops need. Nothing can be loaded afterwards."""


def replicated(parameter: nn.Parameter) -> tuple[Shard, Tensor]:
    """Return the shard of a parameter that every rank holds whole."""
    shape = tuple(parameter.shape)
    return Shard(shape, 0, 0, shape[0]), parameter.data
