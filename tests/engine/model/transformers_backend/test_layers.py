"""Our layers in place of transformers' modules, each alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.model.layers.linear import ReplicatedLinear
from engine.model.transformers_backend.layers import MergedPart, MergedProduct, Norm


def three_parts() -> tuple[list[MergedPart], list[nn.Parameter]]:
    merged = ReplicatedLinear(8, {"q": 6, "k": 4, "v": 4}, bias=False)
    nn.init.normal_(merged.weight)
    product = MergedProduct(merged)
    return [MergedPart(product, i) for i in range(3)], merged.weight.split([6, 4, 4])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0), (2, 2, 1)])
@torch.inference_mode()
def test_parts_of_a_merged_layer_give_their_own_outputs_in_any_order(order):
    parts, weights = three_parts()
    for x in torch.randn(2, 1, 5, 8):
        for i in order:
            torch.testing.assert_close(parts[i](x[None]), x[None] @ weights[i].T)


@torch.inference_mode()
def test_a_merged_layer_is_computed_once_and_then_forgotten(monkeypatch):
    parts, _ = three_parts()
    product, calls = parts[0].merged, []
    forward = product.linear.forward
    monkeypatch.setattr(product.linear, "forward", lambda x: calls.append(x) or forward(x))
    x = torch.randn(1, 5, 8)
    for part in parts:
        part(x)
    assert len(calls) == 1 and product.input is None and not product.parts


def test_heads_of_a_merged_projection_are_normed_where_they_are():
    norm = Norm(8, 1e-6, 0.0)
    nn.init.normal_(norm.weight)
    heads = torch.randn(1, 5, 40)[..., :24].view(1, 5, 3, 8)
    torch.testing.assert_close(norm(heads), norm(heads.contiguous()))
    torch.testing.assert_close(norm(heads.transpose(1, 2)), norm(heads).transpose(1, 2))
