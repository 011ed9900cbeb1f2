"""Whole experts on each rank instead of slices of all: the same results, and in a fixed order the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import expert_split, loader
from engine.model.config import ModelConfig
from engine.model.config_parts.moe import MoEConfig
from engine.model.expert_parallel import check_experts
from engine.model.expert_split import ExpertLoad, ExpertShardPlan, row_bytes, split_experts
from engine.model.fixed_order import in_fixed_order
from engine.model.layers.moe import Experts
from engine.model.shard import ShardPlan
from engine.model.transformers_backend.layers import Llama4Experts
from tests.batches import ByHand, load_by_hand
from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.models import FAMILIES, HYBRIDS, make_model, with_slow
from tests.mxfp4_files import make_mxfp4
from tests.products import each_once, few, in_turns, slow
from tests.ranks import make_plans, make_ranks, on_all, plans_of

MIXTURES = [
    name
    for name, (_, raw) in (FAMILIES | HYBRIDS).items()
    if any(key.endswith("experts") and count for key, count in raw.items()) and "zero_expert_num" not in raw
]
QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
LIKE_OTHERS = ("qwen2_moe", "glm4_moe", "deepseek_v2", "glm_moe_dsa")
SIZES = {name: (2,) if name in HYBRIDS else (2, 4) for name in MIXTURES}  # they have two heads to split
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
STEPS = [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}]


def spread(size: int, fixed_order: bool = False) -> list[ShardPlan]:
    return make_plans(size, expert_parallel=True, fixed_order=fixed_order)


def run(parts: list[ByHand], ranks: list[ShardPlan]) -> list[list[torch.Tensor]]:
    return on_all(ranks, lambda rank: [parts[rank].step(tokens) for tokens in STEPS])


@pytest.mark.parametrize(
    ("family", "size"),
    each_once(with_slow([name for name in MIXTURES if name not in HYBRIDS], LIKE_OTHERS), [2, 4])
    + [pytest.param(name, 2, marks=[pytest.mark.slow] * (name not in QUICK)) for name in HYBRIDS if name in SIZES],
)
def test_ranks_with_whole_experts_have_the_logits_of_the_whole_model(tmp_path, family, size):
    folder, ranks = make_model(tmp_path, family), spread(size)
    whole = load_by_hand(folder)
    expected = [whole.step(tokens) for tokens in STEPS]
    parts = [load_by_hand(folder, tp) for tp in ranks]
    for logits in run(parts, ranks):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert sum(map(experts_of, parts)) == experts_of(whole)


def test_experts_that_return_their_input_are_on_every_rank(tmp_path):
    folder = make_model(tmp_path, "longcat_flash")
    config = EngineConfig(model=str(folder), enable_expert_parallel=True, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="enable_expert_parallel must be left out for LongcatFlashForCausalLM"):
        check_experts(config, ModelConfig.from_folder(folder))


def experts_of(model: ByHand) -> int:
    return sum(len(layer.split.own) for layer in model.model.modules() if isinstance(layer, Experts))


@pytest.mark.parametrize(
    ("dtype", "family"),
    few(2, each_once([torch.bfloat16, torch.float32], QUICK))
    + in_turns([torch.bfloat16, torch.float32], slow([name for name in MIXTURES if name not in QUICK])),
)
def test_in_a_fixed_order_whole_experts_give_the_bits_of_slices_on_any_number_of_ranks(tmp_path, family, dtype):
    check_bits(make_model(tmp_path, family), SIZES[family], dtype)


def test_experts_that_one_kernel_computes_give_the_bits_of_slices(tmp_path):
    wide = {"hidden_size": 128, "moe_intermediate_size": 512}
    check_bits(make_model(tmp_path, "qwen3_moe", **wide), (2, 4), torch.bfloat16)


def check_bits(folder: Path, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    alone = load_by_hand(folder, in_fixed_order(ShardPlan()), dtype)
    expected = [alone.step(tokens) for tokens in STEPS]
    for size in sizes:
        ranks = spread(size, fixed_order=True)
        parts = [load_by_hand(folder, tp, dtype) for tp in ranks]
        for logits in run(parts, ranks):
            assert all(map(torch.equal, logits, expected))


def test_an_exchange_of_rows_sends_as_many_bytes_as_the_formula_says(tmp_path):
    folder, ranks = make_model(tmp_path, "qwen3_moe"), make_ranks(4)
    plans = plans_of(ranks, expert_parallel=True, fixed_order=True)
    cfg = ModelConfig.from_folder(folder)
    run([load_by_hand(folder, tp, torch.bfloat16) for tp in plans], plans)
    tokens = sum(len(ids) for step in STEPS for ids in step.values())
    a_token = row_bytes(plans[0], cfg.moe.experts_per_token, cfg.hidden_size, 2)
    assert [rank.scattered_bytes for rank in ranks] == [len(cfg.moe.layers) * tokens * a_token] * 4


def test_without_a_fixed_order_ranks_exchange_only_sums(tmp_path):
    folder, ranks = make_model(tmp_path, "qwen3_moe"), spread(2)
    run([load_by_hand(folder, tp) for tp in ranks], ranks)
    assert [tp.ranks.scattered_bytes for tp in ranks] == [0, 0]


def test_a_token_of_llama_4_counts_once_for_each_of_its_experts_and_padding_not_at_all(monkeypatch):
    moe = MoEConfig(
        num_experts=3, experts_per_token=2, intermediate_size=4, norm_topk_prob=False, layers=frozenset()
    )  # fmt: skip
    layer, counts = Llama4Experts(8, moe, "silu", ShardPlan()), torch.zeros(3, dtype=torch.int64)
    layer.split.load = ExpertLoad(counts, real=torch.tensor([1, 0]))
    monkeypatch.setattr(layer.split, "partials", lambda _, x, experts, weights: [x])
    routed = torch.zeros(3, 2, 8)  # experts, tokens
    routed[[0, 2, 1, 2], [0, 0, 1, 1]] = 1.0
    layer(routed.flatten(0, 1))
    assert counts.tolist() == [1, 0, 1]


def test_rows_are_exchanged_in_pieces_if_there_are_many_tokens(tmp_path, monkeypatch):
    folder, ranks = make_model(tmp_path, "qwen3_moe"), spread(2, fixed_order=True)
    parts = [load_by_hand(folder, tp) for tp in ranks]
    expected = run(parts, ranks)
    monkeypatch.setattr(expert_split, "TOKENS_AT_ONCE", 3)
    parts = [load_by_hand(folder, tp) for tp in ranks]
    for logits in run(parts, ranks):
        assert all(map(torch.equal, logits, expected[0]))


def test_experts_that_do_not_divide_evenly_are_spread_all_the_same():
    tp = [ExpertShardPlan(TPGroup(rank, 4), expert_parallel=True) for rank in range(4)]
    assert [split_experts(10, 64, rank).own for rank in tp] == [range(2), range(2, 5), range(5, 7), range(7, 10)]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size must be at most the model's number of experts \(3\)"):
        split_experts(3, 64, tp[0])


@pytest.mark.parametrize("name", ["fp8_blocks", "awq", "ct_int8"])
def test_quantized_experts_are_spread(tmp_path, name):
    source = make_model(tmp_path / "source", "qwen3_moe", **SHAPE)
    quantize_folder(source, tmp_path / "model", tmp_path / "twin", *FORMATS[name])
    check(tmp_path / "model", tmp_path / "twin")


def test_experts_in_mxfp4_are_spread(tmp_path):
    check(*make_mxfp4(tmp_path / "model", tmp_path / "twin"))


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_experts_that_are_quantized_at_load_are_spread(tmp_path, method):
    folder, ranks = make_model(tmp_path, "qwen3_moe", **SHAPE | {"intermediate_size": 128}), spread(2)
    whole, *parts = (first_experts(load_by_hand(folder, tp, quantization=method)) for tp in (None, *ranks))
    x, weights, experts = torch.randn(9, 64), torch.rand(9, 2), torch.randn(9, 6).topk(2).indices
    expected = whole(x, experts, weights)
    for mixed in on_all(ranks, lambda rank: parts[rank](x, experts, weights)):
        torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)


def first_experts(model: ByHand) -> Experts:
    return next(layer for layer in model.model.modules() if isinstance(layer, Experts))


def check(folder: Path, twin: Path) -> None:
    """Assert that two ranks with the experts of `folder` have the logits of `twin`."""
    whole, ranks = load_by_hand(twin), spread(2)
    expected = [whole.step(tokens) for tokens in STEPS]
    parts = [load_by_hand(folder, tp) for tp in ranks]
    for logits in run(parts, ranks):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_rank_reads_only_its_own_experts(tmp_path, monkeypatch):
    read: set[str] = set()
    load = loader.load_tensor
    monkeypatch.setattr(loader, "load_tensor", lambda parts, source, name, folder: (
        read.add(name), load(parts, source, name, folder)))  # fmt: skip
    load_by_hand(make_model(tmp_path, "qwen3_moe"), spread(2)[1])
    assert {name.split(".")[5] for name in read if ".experts." in name} == {"3", "4", "5"}


def test_a_model_without_experts_is_refused(tmp_path):
    config = ModelConfig.from_folder(make_model(tmp_path, "llama"))
    with pytest.raises(
        ConfigError, match="enable_expert_parallel must be left out for LlamaForCausalLM, which has no expert"
    ):
        check_experts(EngineConfig(enable_expert_parallel=True, tensor_parallel_size=2), config)
