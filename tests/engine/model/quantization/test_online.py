"""Unquantized checkpoints whose weights are rounded as they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.quantization.online import INT4_GROUPS, Online
from engine.model.shard import Shard
from tests.batches import load_by_hand
from tests.models import FAMILIES, make_model, with_slow
from tests.ranks import make_plans, on_all

STEPS = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}]
# every layer's inputs are a multiple of 128 on two ranks
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_hidden_layers": 1}
WIDE_EXPERTS = {"moe_intermediate_size": 256, "mlp_only_layers": []}


def logits(folder: Path, **options: Any) -> Tensor:
    model = load_by_hand(folder, **options)
    return torch.cat([model.step(tokens) for tokens in STEPS])


def error(found: Tensor, expected: Tensor) -> float:
    """The ratio of root mean squares."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", with_slow(family for family in FAMILIES if family != "gpt_oss"))
def test_every_family_in_int8_stays_close_to_what_it_was(tmp_path, family):
    folder = make_model(tmp_path, family)
    assert 1e-4 < error(logits(folder, quantization="int8"), logits(folder)) < 0.2


@pytest.mark.parametrize(
    ("family", "shape"), [("llama", WIDE), ("llama_tied", WIDE), ("qwen3_moe", WIDE | WIDE_EXPERTS)]
)
@pytest.mark.parametrize(("method", "rounded", "split"), [("int8", 0.06, 0.06), ("int4", 0.3, 0.02)])
def test_a_rounded_model_is_nearly_the_same_on_one_rank_and_on_two(tmp_path, family, shape, method, rounded, split):
    folder = make_model(tmp_path, family, **shape)
    alone = logits(folder, quantization=method)
    assert error(alone, logits(folder)) < rounded
    ranks = make_plans(2)
    parts = [load_by_hand(folder, tp, quantization=method) for tp in ranks]
    for found in on_all(ranks, lambda rank: [parts[rank].step(tokens) for tokens in STEPS]):
        assert error(torch.cat(found), alone) < split


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_head_has_eight_bits_and_the_embedding_keeps_its_own(tmp_path, family, method):
    folder = make_model(tmp_path, family, **WIDE)
    model, plain = (load_by_hand(folder, quantization=m).model for m in (method, None))
    assert torch.equal(model.embed_tokens.weight, plain.embed_tokens.weight)
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert 1e-4 < error(model.logits(hidden), plain.logits(hidden)) < 0.02
    values, ids = model.best(hidden)
    assert torch.equal(values, model.logits(hidden).max(-1).values)
    assert torch.equal(ids, model.logits(hidden).argmax(-1))


@torch.inference_mode()
def test_experts_are_multiplied_as_they_are(tmp_path):
    folder = make_model(tmp_path, "qwen3_moe", **WIDE | WIDE_EXPERTS)
    experts = load_by_hand(folder, quantization="int8").model.layers[0].mlp.experts
    assert experts.gate_up is None
    assert not any(isinstance(weight, Tensor) for weights in experts.kernels for weight in weights)


@pytest.mark.parametrize(("inputs", "group"), [(384, 128), (576, 64), (96, 32)])
def test_numbers_in_four_bits_are_off_by_half_a_step_of_their_group_and_zero_stays_zero(inputs, group):
    weight = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0)) + 2
    weight[:, ::7] = 0
    rounded = Online("int4").quantize(weight)
    assert rounded.group_size == group
    steps = rounded.scale.repeat_interleave(group, dim=1)
    assert ((rounded.dequantize(torch.float32) - weight).abs() <= steps * 0.51).all()
    assert not rounded.dequantize(torch.float32)[:, ::7].any()


def test_inputs_that_groups_do_not_divide_are_refused_where_a_rank_has_them(tmp_path):
    Online("int4").check(Shard((64, 96), 1, 0, INT4_GROUPS[-1]))
    folder = make_model(tmp_path, "qwen3_moe", **WIDE | WIDE_EXPERTS | {"moe_intermediate_size": 144})
    with pytest.raises(
        ConfigError,
        match="quantization must be fp8 or int8: a layer has 144 inputs on each rank, which is not a multiple of 32",
    ):
        load_by_hand(folder, quantization="int4")


def test_experts_that_lie_in_a_tensor_of_their_own_form_are_not_rounded(tmp_path):
    with pytest.raises(ConfigError, match="quantization must be mxfp4 or left out, for the experts of gpt-oss"):
        load_by_hand(make_model(tmp_path, "gpt_oss"), quantization="int8")


def test_a_method_is_part_of_what_a_model_is(tmp_path):
    folder = make_model(tmp_path, "llama")
    configs = {method: ModelConfig.from_folder(folder, method) for method in (None, "fp8", "int8", "int4")}
    assert len(set(map(repr, configs.values()))) == 4
