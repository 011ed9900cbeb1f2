"""Our kernels at the shapes of `make first-gpu`, each made small where it stands on a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import engines, first
from benchmarks.gpu.card import Card
from benchmarks.gpu.engines import SHAPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "n_routed_experts": 8, "num_local_experts": 8, "vocab_size": 512,
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def small_shape(shape: dict[str, Any]) -> dict[str, Any]:
    small = {key: value for key, value in SMALL.items() if key in shape}
    return {**shape, **small, **({"num_key_value_heads": 4} if "kv_lora_rank" in small else {})}


@pytest.mark.slow
@pytest.mark.parametrize("name", first.TRIED)
def test_all_kernels_are_right_in_their_trial(name, monkeypatch):
    shape, options = first.TRIED[name]
    if "stand-in" in torch.cuda.get_device_name():
        monkeypatch.setitem(engines.SHAPES, shape, small_shape(SHAPES[shape]))
    monkeypatch.setattr(first, "TRIED", {name: (shape, options)})
    (numbers,) = first.tried(Card(1e12, 1e14))
    ((unit, right),) = numbers.items()
    assert unit == f"right of {right} kernels, {name}"
    assert right > 4
