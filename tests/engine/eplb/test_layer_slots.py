"""The weights of one expert, in each form in which a layer keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.eplb.layer_slots import LayerSlots, add_slots
from engine.model.layers.moe import Experts, ExpertWeights
from engine.model.ops import linear
from engine.model.quantization.packed_experts import PackedExperts

OWN, SLOTS = 3, 5


class Layer(Experts):
    """A layer with room for two more experts than it has."""

    def __init__(self, **weights: Any):
        nn.Module.__init__(self)
        self.split = SimpleNamespace(spread=True, num_slots=SLOTS)  # type: ignore[assignment]
        for name, value in {"kernels": (), "kept": None, "biases": None, **weights}.items():
            setattr(self, name, value)


class Product:
    """Like a product with a quantized weight: an object with tensors."""

    def __init__(self) -> None:
        self.values, self.scale, self.inputs = torch.randint(256, (8, 4), dtype=torch.uint8), torch.rand(8), 4


def biases() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(OWN, 16), torch.rand(OWN, 4)


def packed(offsets: bool) -> PackedExperts:
    scales = torch.rand(OWN, 8, 1)
    return PackedExperts(torch.randint(9, (OWN, 8, 4)).to(torch.int8), scales, scales.clone() if offsets else None, 4)


def kernels(make: Any) -> list[ExpertWeights]:
    return [ExpertWeights(make(), make(), biases()) for _ in range(2)]


FORMS = {
    "on a CPU, in one tensor": lambda: Layer(kernels=kernels(lambda: torch.rand(OWN, 2, 2, 8, 2))),
    "on a CPU, for oneDNN": lambda: Layer(kernels=kernels(lambda: [linear.pack(torch.rand(8, 4)) for _ in range(OWN)])),
    "on a CPU, quantized": lambda: Layer(kernels=kernels(lambda: [Product() for _ in range(OWN)])),
    "on a GPU": lambda: Layer(
        gate_up=nn.Parameter(torch.rand(OWN, 16, 4), requires_grad=False),
        down=nn.Parameter(torch.rand(OWN, 4, 8), requires_grad=False),
        biases=biases(),
    ),
    "on a GPU, quantized": lambda: Layer(kept=(None, packed(offsets=True), packed(offsets=False))),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_can_be_written_to_an_empty_slot_and_others_stay_as_they_were(form):
    source, target = FORMS[form](), FORMS[form]()
    before = [[tensor.clone() for tensor in LayerSlots(target).read(slot)] for slot in range(OWN)]
    sent = [tensor.clone() for tensor in LayerSlots(source).read(1)]
    add_slots(nn.ModuleList([target]))
    slots = LayerSlots(target)
    slots.write(SLOTS - 1, slots.take([tensor.clone() for tensor in sent]))
    slots.write(0, slots.take([tensor.clone() for tensor in sent]))
    assert len(sent) == len(before[0]) > 1
    for slot, expected in ((SLOTS - 1, sent), (0, sent), (1, before[1]), (2, before[2])):
        assert all(map(torch.equal, slots.read(slot), expected))


@pytest.mark.parametrize("form", ["on a GPU", "on a GPU, quantized"])
def test_there_is_room_for_the_experts_of_a_layer_that_arrive(form):
    layer = FORMS[form]()
    add_slots(nn.ModuleList([layer]))
    slots = LayerSlots(layer)
    assert [tuple(room.shape) for room in slots.room()] == [(SLOTS, *tensor.shape) for tensor in slots.read(0)]
