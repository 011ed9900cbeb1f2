"""Metadata of GGUF files that anybody has written: whatever a key of a family says, it is refused by name or read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.model.checkpoint.gguf.config import config
from engine.model.checkpoint.gguf.header import Header
from engine.model.checkpoint.gguf.keys import GGUFError
from engine.model.checkpoint.gguf.names import entries
from engine.model.checkpoint.gguf.source import GGUFSource
from tests.gguf_files import write_gguf
from tests.models import make_model

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3n": {"vocab_size_per_layer_input": 97},
    "gemma4": {},
    "gemma4_moe": {},
    "falcon_h1": {"key_multiplier": 1.0},
    "nemotron_h": {},
    "kimi_linear": {},
    "deepseek_v3": {},
    "minicpm3": {},
    "qwen3_next": {"mlp_only_layers": []},
    "granite4_moe": {},
    "lfm2_moe": {},
}
BAD = [0, 1, 7, -1, 10**12, 1e30, math.nan, "x", "", True, [], [0], [1] * 3, [1] * 4, ["x"] * 4, [[1]] * 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_key_is_read_or_refused_in_one_line(tmp_path, family):
    write_gguf(make_model(tmp_path / "model", family, **FAMILIES[family]), tmp_path / "model.gguf", "F16")
    header = Header(tmp_path / "model.gguf")
    factors = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12} if family.startswith("gemma4") else {}
    refusals: list[str] = []
    for key in [name for name in header.metadata if not name.startswith(("tokenizer.", "general."))]:
        for bad in BAD:
            source = GGUFSource(header.metadata | {key: bad}, header.tensors, factors)
            try:
                entries(source)
                config(source)
            except GGUFError as error:
                refusals.append(str(error))
    assert refusals and all("\n" not in text and len(text) < 500 for text in refusals)
