from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.model.config_parts.moe import MoEConfig
from engine.model.layers.moe import BiasedRouter, MixtureOfExperts, Router
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
@torch.inference_mode()
def test_what_all_tokens_share_is_added_once(size, gated):
    shapes = {
        **SHAPES,
        "shared_expert.gate_up_proj.gate.weight": (6, HIDDEN),
        "shared_expert.gate_up_proj.up.weight": (6, HIDDEN),
        "shared_expert.down_proj.weight": (HIDDEN, 6),
    }
    if gated:
        shapes["shared_expert_gate.weight"] = (1, HIDDEN)
    tensors, x = random_tensors(shapes), torch.randn(9, HIDDEN)
    gate, up, down = (
        tensors[f"shared_expert.{name}.weight"] for name in ("gate_up_proj.gate", "gate_up_proj.up", "down_proj")
    )
    shared = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    if gated:
        shared = shared * torch.sigmoid(x @ tensors["shared_expert_gate.weight"].T)
    cfg = tiny_config(hidden_size=HIDDEN, moe=make_moe())
    (routed,) = run_sharded(
        1, lambda tp: MixtureOfExperts(cfg, tp), {name: tensors[name] for name in SHAPES}, lambda rank: (x,)
    )
    cfg = tiny_config(hidden_size=HIDDEN, moe=replace(make_moe(), shared_intermediate_size=6, shared_gate=gated))
    for out in run_sharded(size, lambda tp: MixtureOfExperts(cfg, tp), tensors, lambda rank: (x,)):
        torch.testing.assert_close(out, routed + shared, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_correction_decides_which_experts_are_chosen_and_not_what_they_weigh():
    moe = replace(make_moe(), scoring="sigmoid", routed_scaling_factor=2.5)
    tensors = {
        "weight": torch.zeros(EXPERTS, HIDDEN),
        "e_score_correction_bias": torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0]),
    }
    experts, weights = load(BiasedRouter(HIDDEN, moe), tensors)(torch.randn(3, HIDDEN))
    assert experts.tolist() == [[1, 3]] * 3
    torch.testing.assert_close(weights, torch.full((3, 2), 1.25))


@torch.inference_mode()
def test_experts_come_from_the_groups_whose_two_best_are_best_together():
    moe = replace(make_moe(), num_experts=6, scoring="sigmoid", num_groups=3, topk_groups=1, norm_topk_prob=False)
    # the single best expert is 0, but 4 and 5 are best together
    tensors = {
        "weight": torch.zeros(6, HIDDEN),
        "e_score_correction_bias": torch.tensor([5.0, 0.0, 1.0, 1.0, 3.0, 4.0]),
    }
    experts, weights = load(BiasedRouter(HIDDEN, moe), tensors)(torch.randn(1, HIDDEN))
    assert experts.tolist() == [[5, 4]]
    torch.testing.assert_close(weights, torch.full((1, 2), 0.5))


@pytest.mark.parametrize("normalise", [True, False])
@torch.inference_mode()
def test_routing_weights_sum_to_one_only_where_the_model_normalises_them(normalise):
    router = load(Router(HIDDEN, make_moe(normalise)), random_tensors({"weight": (EXPERTS, HIDDEN)}))
    _, weights = router(torch.randn(7, HIDDEN))
    ones = torch.ones(7)
    assert torch.allclose(weights.sum(-1), ones) == normalise
