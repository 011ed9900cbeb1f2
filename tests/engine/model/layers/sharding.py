"""Loads a layer's ranks from one dict of whole tensors, and runs them together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.model.shard import Sharded, ShardPlan
from tests.ranks import make_plans, on_all


class WholeTensor:
    """A tensor with the interface of a slice on disk."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.tensor[index]


def load(layer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Fill `layer` from `tensors`, by the names that its layers ask for; everything else becomes NaN."""
    for parameter in layer.parameters():
        parameter.data.fill_(torch.nan)
    for path, module in layer.named_modules():
        if isinstance(module, Sharded):
            for name, (shard, target) in module.shards().items():
                tensor = tensors[f"{path}.{name}".lstrip(".")]
                assert tuple(tensor.shape) == shard.shape
                shard.load(WholeTensor(tensor), target)
    return layer


def run_sharded(
    size: int,
    build: Callable[[ShardPlan], nn.Module],
    tensors: dict[str, Tensor],
    inputs: Callable[[int], tuple[Tensor, ...]],
) -> list:
    """Output of each of `size` ranks for its `inputs(rank)`."""
    plans = make_plans(size)
    layers = [load(build(plan), tensors) for plan in plans]
    return on_all(plans, lambda rank: layers[rank](*inputs(rank)))


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
