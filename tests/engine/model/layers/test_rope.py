"""Frequencies of every type are compared with transformers in tests/engine/model/models/test_parity.py."""

from __future__ import annotations

import torch

from engine.model.config_parts.rope import RopeConfig
from engine.model.layers.attention import Attention
from engine.model.layers.rope import inverse_frequencies, rope_table
from engine.model.ops.rope import rotate_plain
from tests.engine.model.model_configs import tiny_config

CPU = torch.device("cpu")


def test_layers_with_one_configuration_share_one_table():
    thetas = (5.0, 5.0, 6.0)
    cfg = tiny_config(num_layers=3, rope=tuple(RopeConfig(theta=theta) for theta in thetas))
    tables = [Attention(cfg, layer, torch.float32, CPU).table for layer in range(3)]
    assert tables[0] is tables[1]
    assert tables[0] is not tables[2]


def test_scores_depend_on_the_distance_between_tokens_only():
    table, positions = rope_table(RopeConfig(), 8, 64, torch.float32, CPU), torch.tensor([0, 3, 10, 13])
    q, k = torch.randn(1, 1, 8).expand(4, 1, 8), torch.randn(1, 1, 8).expand(4, 1, 8)
    q, k = (rotate_plain(x, table, positions) for x in (q, k))
    torch.testing.assert_close((q[1] * k[0]).sum(), (q[3] * k[2]).sum())


def test_linear_scaling_by_two_turns_position_2n_like_position_n():
    plain = rope_table(RopeConfig(), 8, 32, torch.float32, CPU)
    scaled = rope_table(RopeConfig(type="linear", factor=2.0), 8, 64, torch.float32, CPU)
    torch.testing.assert_close(scaled[::2], plain)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), 128)
    rope = RopeConfig(type="llama3", theta=500_000.0, factor=8.0, original_max_position_embeddings=8192)
    scaled = inverse_frequencies(rope, 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8


def test_yarn_scales_cos_and_sin_by_its_attention_factor():
    rope = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5)
    table = rope_table(rope, 8, 4, torch.float32, CPU)
    torch.testing.assert_close(table[0], torch.tensor([1.5] * 4 + [0.0] * 4))


def test_a_bfloat16_table_is_rounded_only_at_the_end():
    exact = rope_table(RopeConfig(), 8, 5000, torch.float32, CPU)
    rounded = rope_table(RopeConfig(), 8, 5000, torch.bfloat16, CPU)
    assert torch.equal(rounded, exact.bfloat16())
