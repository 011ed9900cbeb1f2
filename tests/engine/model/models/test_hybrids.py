"""Models with recurrent layers against transformers, over borders, and against themselves cut up in any way."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.batches import load_by_hand
from tests.models import HYBRIDS, make_model, with_slow
from tests.products import each_once, few
from tests.ranks import check_ranks, make_plans, on_all
from tests.state_batches import same_bits

TOKENS = torch.randint(97, (150,), generator=torch.Generator().manual_seed(1)).tolist()  # two borders
PARTS = (1, 2, 60, 1, 1, 10, 50, 1, 1, 1, 1, 21)
IN_EVERY_RUN = ("qwen3_next", "falcon_h1", "nemotron_h", "lfm2")
FAMILIES = with_slow(HYBRIDS, [family for family in HYBRIDS if family not in IN_EVERY_RUN])


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_equal_those_of_transformers_whole_and_in_parts_beside_another(tmp_path, family):
    folder = make_model(tmp_path, family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference(torch.tensor([TOKENS])).logits[0]
    # Kimi Linear: transformers' own logits of up to 14 differ by 1.1e-4 between float32 and float64
    near = {"atol": 2e-4 if family == "kimi_linear" else 1e-4, "rtol": 0}
    torch.testing.assert_close(load_by_hand(folder).step({0: TOKENS}), expected, **near)
    torch.testing.assert_close(in_parts(load_by_hand(folder)), expected, **near)


def in_parts(model) -> torch.Tensor:
    """Logits of TOKENS, computed in PARTS beside a sequence that grows by three tokens in each step."""
    logits, start = [], 0
    for count in PARTS:
        logits.append(model.step({1: [5, 6, 7], 0: TOKENS[start : start + count]})[3:])
        start += count
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", with_slow(["qwen3_5", "bamba", "falcon_h1", "lfm2"], ["falcon_h1", "lfm2"]))
def test_a_token_has_the_same_bits_in_a_prompt_in_parts_and_decoded(tmp_path, family, dtype):
    folder = make_model(tmp_path, family)
    whole = load_by_hand(folder, dtype=dtype).step({0: TOKENS})
    assert same_bits(in_parts(load_by_hand(folder, dtype=dtype)), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_of_two_ranks_have_the_logits_of_the_unsharded_model(tmp_path, family):
    check_ranks(make_model(tmp_path, family), 2)


@pytest.mark.parametrize(
    ("family", "dtype"), few(1, each_once(with_slow(FAMILIES, ["falcon_h1"]), [torch.float32, torch.bfloat16]))
)
def test_with_strict_determinism_ranks_have_the_bits_of_one(tmp_path, family, dtype):
    # six heads do not divide among four ranks, nor do two
    heads = {"mamba_n_heads": 8, "mamba_d_head": 12} if family == "bamba" else {}
    folder, bits = make_model(tmp_path, family, **heads), []
    for size in (1, 2) if family == "qwen3_next" else (1, 2, 4):
        ranks = make_plans(size, fixed_order=True)
        parts = [load_by_hand(folder, tp, dtype) for tp in ranks]
        bits.append(on_all(ranks, lambda rank, parts=parts: in_parts(parts[rank]))[0])
    assert all(same_bits(bits[0], others) for others in bits[1:])
