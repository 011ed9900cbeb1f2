from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.batches import load_by_hand
from tests.models import make_model
from tests.products import each_once

GEMMAS = ("gemma3n", "gemma4", "gemma4_moe")


def prompt(length: int) -> list[int]:
    return [3 + 7 * i * i % 83 for i in range(length)]


@pytest.mark.parametrize(("dtype", "family"), each_once([torch.bfloat16, torch.float32], GEMMAS))
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_in_a_batch_in_chunks_and_decoded(tmp_path, family, dtype):
    model, tokens, other = load_by_hand(make_model(tmp_path, family), dtype=dtype), prompt(21), prompt(7)
    alone = model.step({0: tokens})
    assert torch.equal(model.step({1: other, 2: tokens})[len(other) :], alone)
    chunks = [model.step({3: tokens[i : i + 5], 10 + i: other})[: len(tokens[i : i + 5])] for i in range(0, 21, 5)]
    assert torch.equal(torch.cat(chunks), alone)
    assert torch.equal(torch.cat([model.step({4: [token]}) for token in tokens]), alone)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
@torch.inference_mode()
def test_what_layers_would_keep_that_read_the_kv_of_others_is_not_loaded(tmp_path, family):
    folder = make_model(tmp_path, family)
    expected = load_by_hand(folder).step({0: prompt(9)})
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{name}.weight"] = torch.ones(32, 48)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_by_hand(folder).step({0: prompt(9)}), expected)
