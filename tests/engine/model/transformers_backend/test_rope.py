"""Rotation by our kernel in place of transformers' function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.smollm3 import modeling_smollm3

from engine.model.config import ModelConfig
from engine.model.ops.rope import rotate_plain
from engine.model.shard import ShardPlan
from engine.model.transformers_backend.attention import CurrentStep
from engine.model.transformers_backend.model import find_calls
from engine.model.transformers_backend.rope import is_plain, replace_rotation
from tests.transformers_models import make_transformers_model


@pytest.mark.parametrize(
    ("module", "rotary_dim", "plain"),
    [
        pytest.param(modeling_smollm3, 16, True, id="halves"),
        pytest.param(modeling_smollm3, 8, False, id="a part, which this function cannot do"),
        pytest.param(modeling_gpt_neox, 8, True, id="a part of halves"),
        pytest.param(modeling_ernie4_5, 16, False, id="pairs side by side"),
        pytest.param(modeling_glm4, 8, False, id="a part of pairs side by side"),
    ],
)
def test_functions_that_rotate_as_our_kernel_does_are_told_from_others(module, rotary_dim, plain):
    assert is_plain(module.apply_rotary_pos_emb, 16, rotary_dim) == plain


@pytest.mark.parametrize(
    ("name", "rotated"),
    [
        ("SmolLM3ForCausalLM", [True, True, True]),
        ("HunYuanDenseV1ForCausalLM", [False, False, False]),  # norms after the rotation
        ("PhiForCausalLM", [False, False, False]),  # puts parts together after the rotation
    ],
)
def test_only_what_goes_straight_from_rotation_to_attention_is_rotated_there(tmp_path, name, rotated):
    cfg = ModelConfig.from_folder(make_transformers_model(tmp_path, name))
    assert [call.rotated for call in find_calls(cfg, ShardPlan()).values()] == rotated


def apply_rotary_pos_emb(*args: object) -> str:
    return "theirs"


class Layer(nn.Module):
    def forward(self, x: int, *, y: int = 2) -> tuple[object, int, int]:
        return apply_rotary_pos_emb(x), x, y


def test_a_replaced_rotation_is_that_of_one_module_alone():
    one, other = Layer(), Layer()
    replace_rotation(one, lambda theirs, x: ("ours", theirs(x)))
    assert one(1) == (("ours", "theirs"), 1, 2)
    assert one(1, y=3) == (("ours", "theirs"), 1, 3)
    assert other(1) == ("theirs", 1, 2)


def angles() -> Iterator[Tensor]:
    half = torch.rand(1, 5, 8)
    return (torch.cat((x, x), dim=-1) for x in (half.cos(), half.sin()))


def test_a_table_rotates_as_transformers_cosines_and_sines_do():
    cos, sin = angles()
    q = torch.randn(1, 3, 5, 16)
    expected, _ = modeling_smollm3.apply_rotary_pos_emb(q, q, cos, sin)
    found = rotate_plain(q[0].transpose(0, 1), CurrentStep().table(cos, sin), torch.arange(5))
    torch.testing.assert_close(found, expected[0].transpose(0, 1))
    unchanged = rotate_plain(q[0].transpose(0, 1), CurrentStep().no_rotation(q), torch.arange(5))
    assert torch.equal(unchanged, q[0].transpose(0, 1))


def test_angles_that_differ_between_the_halves_are_left_to_transformers():
    cos, sin = angles()
    assert CurrentStep().table(cos, sin.sort().values) is None
