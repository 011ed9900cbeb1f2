"""How tensors of a checkpoint get into the parameters of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from engine.errors import ConfigError


class TensorSlice(Protocol):
    """A tensor on disk, of which only what is indexed is read; safetensors' PySafeSlice."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one checkpoint tensor that this rank holds: entries from `start` on of dimension `dim`.

    target: view of a parameter, where the part goes; its size says how much is taken
    shape: of the whole tensor in the checkpoint
    """

    target: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def load(self, source: TensorSlice) -> None:
        """Copy this rank's part, converted to the parameter's dtype and device."""
        if self.target.numel() == 0:  # a rank past the end of an odd vocabulary
            return
        if not source.get_shape():  # one number, which some write without a dimension
            self.target.fill_(source[()])
            return
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.start, self.start + self.target.shape[self.dim])
        self.target.copy_(source[tuple(index)])


class Sharded(nn.Module):
    """A layer that owns parameters. quantized_parameters: how many, of those that are not nn.Parameters."""

    quantized_parameters = 0

    def shards(self) -> dict[str, Shard]:
        """Name of each checkpoint tensor that this layer reads, relative to the layer; together they fill it."""
        raise NotImplementedError

    def pack(self) -> None:
        """Bring the loaded weights into the form that the ops want; nothing can be loaded after that."""


def replicated(parameter: nn.Parameter) -> Shard:
    """Every rank holds all of it."""
    return Shard(parameter.data, tuple(parameter.shape))


def divide(total: int, ranks: int, what: str) -> int:
    """`total` per rank. Raises ConfigError unless it divides."""
    if total % ranks:
        raise ConfigError("tensor_parallel", ranks, f"a divisor of the model's {what} ({total})")
    return total // ranks
