from __future__ import annotations

import pytest

from cluster.lab.simulator.cost_model import CARDS, MODELS, Work, find_model, kv_tokens, roofline
from engine.errors import InvalidParameter
from engine.wire.plan import StepPlan
from tests.models import make_model


def test_work_of_a_plan_counts_pairs_as_causal_attention_does():
    plan = StepPlan(1, [], [], slots=[0, 1], starts=[10, 0], counts=[1, 3], samples=[True, True])
    # the one token sees 11; the three see 1, 2 and 3
    assert Work.of(plan) == Work(tokens=4, sequences=2, pairs=11 + 6, context=11 + 3)


def test_a_step_takes_what_the_data_sheet_allows():
    cost = roofline(MODELS["llama-3.1-8b"], CARDS["h100"])
    decode, prompt = cost.seconds(1, 1, 1000, 1000), cost.seconds(2000, 1, 2_000_000, 2000)
    assert decode > 16.06e9 / 3.35e12  # all weights are read
    assert prompt > 2 * 8.03e9 * 2000 / 989e12
    assert roofline(MODELS["llama-3.1-8b"], CARDS["h100"], 4).seconds(1, 1, 1000, 1000) < decode


def test_what_weights_leave_of_the_memory_is_for_kv():
    assert kv_tokens(MODELS["llama-3.1-8b"], CARDS["h100"]) == pytest.approx(400_000, rel=0.1)
    with pytest.raises(InvalidParameter, match="tensor_parallel_size"):
        kv_tokens(MODELS["llama-3.1-70b"], CARDS["h100"])


def test_a_model_folder_says_how_large_the_model_is(tmp_path):
    make_model(tmp_path, "qwen3")
    shape = find_model(str(tmp_path))
    assert 0 < shape.active == shape.parameters
    with pytest.raises(InvalidParameter, match=r"config\.json"):
        find_model(str(tmp_path / "nothing"))
