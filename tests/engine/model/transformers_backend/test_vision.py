"""Layers of vision towers that our own kernels compute, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.model.transformers_backend.vision import TowerLinear, TowerPatches, with_own_kernels

TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(48, 64), (2, 5, 48)),
        (nn.Linear(48, 33, bias=False), (48,)),
        (nn.Conv2d(3, 64, 4, 4), (2, 3, 13, 8)),  # the 13th row is in no window
        (nn.Conv2d(3, 64, 4, 4, padding="valid", bias=False), (1, 3, 4, 4)),
        (nn.Conv3d(3, 64, [2, 4, 4], [2, 4, 4]), (5, 3, 2, 4, 4)),
    ],
)
def test_a_layer_of_a_tower_equals_torchs(layer, shape, dtype):
    tower, x = nn.Sequential(layer.to(dtype)), torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        expected = tower(x)
        with_own_kernels(tower)
        tower[0].pack()
        assert isinstance(tower[0], TowerPatches if isinstance(layer, nn.Conv2d | nn.Conv3d) else TowerLinear)
        torch.testing.assert_close(tower(x), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_layer_takes_rows_that_do_not_lie_in_one_piece(dtype):
    layer, x = nn.Linear(64, 128).to(dtype), torch.randn(1, 64, 30).to(dtype).transpose(1, 2)
    expected, tower = layer(x), nn.Sequential(layer)
    with_own_kernels(tower)
    tower[0].pack()
    torch.testing.assert_close(tower(x), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 2, 2, padding=1),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        nn.Conv2d(4, 4, 2, 2, dilation=2),
        nn.Conv2d(4, 4, 2, 2, padding="valid", dilation=2),
        nn.LayerNorm(4),
    ],
)
def test_any_other_layer_is_left_as_it_is(layer):
    tower = nn.Sequential(layer)
    with_own_kernels(tower)
    assert tower[0] is layer
