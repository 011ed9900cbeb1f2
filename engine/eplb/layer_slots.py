"""The weights of a layer's experts on one rank, slot by slot, in the form that the layer computes with."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.model.layers.moe import Experts, ExpertWeights
from engine.model.ops import linear
from engine.model.quantization.packed_experts import PackedExperts

Stored = Tensor | list[Any]
"""Weights of all slots: a tensor [slots, ...], or a list with a packed tensor or a quantized product for each slot."""


class LayerSlots:
    """Reads and writes the experts of a layer. All slots of a layer have tensors of the same shapes."""

    def __init__(self, layer: Experts):
        self._stored = [weights for part in parts_of(layer) for weights in flat(part)]

    def read(self, slot: int) -> list[Tensor]:
        """Return the tensors of a slot, which share memory with its weights unless these are packed by oneDNN."""
        return [tensor for weights in self._stored for tensor in tensors_of(weights[slot])]

    def room(self) -> list[Tensor]:
        """Return memory for the experts of all slots, one tensor for each that `read` returns."""
        return [torch.empty_like(each) for each in self._stored if isinstance(each, Tensor)]

    def take(self, tensors: list[Tensor]) -> list[Any]:
        """Return what `write` needs, made of the tensors that another slot holds, in the order of `read`."""
        rest = iter(tensors)
        return [next(rest) if isinstance(each, Tensor) else with_tensors(each[0], rest) for each in self._stored]

    def write(self, slot: int, weights: list[Any]) -> None:
        """Put an expert into a slot."""
        for there, new in zip(self._stored, weights, strict=True):
            if isinstance(there, Tensor):
                there[slot].copy_(new)
            else:
                there[slot] = new


def add_slots(model: nn.Module) -> None:
    """Make room for experts that other ranks will send, in each layer of a model whose weights are packed. The new
    slots follow those of the rank's own experts, and are empty."""
    for layer in model.modules():
        if isinstance(layer, Experts) and layer.split.spread:
            _grow(layer, layer.split.num_slots)


def _grow(layer: Experts, count: int) -> None:
    if layer.kernels:
        layer.kernels = [ExpertWeights(*longer(part, count)) for part in layer.kernels]
    elif layer.kept is not None:
        layer.kept = layer.kept[0], *longer(layer.kept[1:], count)
        layer.biases = longer(layer.biases, count)
    elif layer.gate_up is not None and layer.down is not None:
        for name in ("gate_up", "down"):
            weights = longer(getattr(layer, name).data, count)
            setattr(layer, name, nn.Parameter(weights, requires_grad=False))
        layer.biases = longer(layer.biases, count)


def parts_of(layer: Experts) -> list[Any]:
    """Return everything of a layer that has one entry for each slot."""
    if layer.kernels:
        return list(layer.kernels)
    if layer.kept is not None:
        return [*layer.kept[1:], layer.biases]
    assert layer.gate_up is not None and layer.down is not None
    return [layer.gate_up.data, layer.down.data, layer.biases]


def flat(part: Any) -> Iterator[Stored]:
    """Yield the tensors and lists of a part of a layer."""
    match part:
        case Tensor() | list():
            yield part
        case PackedExperts():
            yield from flat((part.values, part.scales, part.offsets))
        case tuple():
            for each in part:
                yield from flat(each)


def longer(part: Any, count: int) -> Any:
    """Return a part of a layer with room for `count` experts."""
    match part:
        case Tensor():
            grown = part.new_zeros(count, *part.shape[1:])
            grown[: len(part)] = part
            return grown
        case list():  # the first expert stands in the new slots, from which no token takes it
            return [*part, *[part[0]] * (count - len(part))]
        case PackedExperts():
            values, scales, offsets = longer((part.values, part.scales, part.offsets), count)
            return replace(part, values=values, scales=scales, offsets=offsets)
        case tuple():
            return tuple(longer(each, count) for each in part)
    return part


def tensors_of(weight: Any) -> list[Tensor]:
    """Return the tensors of one weight: a tensor, or an object with tensors as attributes."""
    if isinstance(weight, Tensor):
        return [weight.to_dense() if weight.is_mkldnn else weight]
    return [value for _, value in sorted(vars(weight).items()) if isinstance(value, Tensor)]


def with_tensors(weight: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a weight like this one, made of other tensors, in the order of `tensors_of`."""
    if isinstance(weight, Tensor):
        return linear.pack(next(tensors)) if weight.is_mkldnn else next(tensors)
    twin = copy(weight)
    for name, value in sorted(vars(weight).items()):
        if isinstance(value, Tensor):
            setattr(twin, name, next(tensors))
    return twin
