from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model.config import MoEConfig
from engine.model.layers.moe import MixtureOfExperts, Router
from tests.engine.model.layers.sharding import load, random_tensors, run_sharded
from tests.engine.model.model_configs import tiny_config

HIDDEN, EXPERTS, INTERMEDIATE = 16, 5, 8
SHAPES = {"gate.weight": (EXPERTS, HIDDEN)}
for i in range(EXPERTS):
    SHAPES[f"experts.{i}.gate_up_proj.gate.weight"] = (INTERMEDIATE, HIDDEN)
    SHAPES[f"experts.{i}.gate_up_proj.up.weight"] = (INTERMEDIATE, HIDDEN)
    SHAPES[f"experts.{i}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)


def make_moe(normalise: bool = True) -> MoEConfig:
    return MoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        intermediate_size=INTERMEDIATE,
        norm_topk_prob=normalise,
        layers=frozenset({0}),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 9])
@torch.inference_mode()
def test_experts_equal_a_loop_over_tokens_on_any_number_of_ranks(size, tokens):
    tensors = random_tensors(SHAPES)
    x = torch.randn(tokens, HIDDEN)
    expected = torch.zeros_like(x)
    for token, row in enumerate(x):
        weights, chosen = (tensors["gate.weight"] @ row).softmax(0).topk(2)
        for weight, i in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            gate, up, down = (
                tensors[f"experts.{i}.{name}.weight"] for name in ("gate_up_proj.gate", "gate_up_proj.up", "down_proj")
            )
            expected[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    cfg = tiny_config(hidden_size=HIDDEN, moe=make_moe())
    for out in run_sharded(size, lambda tp: MixtureOfExperts(cfg, tp), tensors, lambda rank: (x,)):
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("normalise", [True, False])
@torch.inference_mode()
def test_routing_weights_sum_to_one_only_where_the_model_normalises_them(normalise):
    router = load(Router(HIDDEN, make_moe(normalise)), random_tensors({"weight": (EXPERTS, HIDDEN)}))
    _, weights = router(torch.randn(7, HIDDEN))
    ones = torch.ones(7)
    assert torch.allclose(weights.sum(-1), ones) == normalise
