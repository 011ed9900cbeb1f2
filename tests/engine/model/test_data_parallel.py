"""Engines that share the experts of a model: each has the logits of the whole model for its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.distributed.expert_exchange import ExpertExchange
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import expert_split
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts
from engine.model.expert_split import split_experts
from engine.model.fixed_order import FixedOrder
from engine.model.layers.moe import Experts
from tests.batches import ByHand, load_by_hand
from tests.engine.model.test_expert_parallel import MIXTURES, QUICK
from tests.models import make_model, with_slow
from tests.products import each_once
from tests.ranks import make_ranks, on_all

Step = dict[int, list[int]] | None

#: What each engine computes, step by step: unequal numbers of tokens, and now and then none.
STEPS: list[list[Step]] = [
    [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}, None, {0: [3]}],
    [None, {0: list(range(30, 41))}, {0: [4]}, {0: [2], 1: [1, 2, 3]}],
    [{0: [7]}, None, {0: [8, 9]}, None],
    [None, None, {0: [5, 6, 7, 8, 9]}, {0: [1]}],
]

FAST = {("qwen3_moe", torch.bfloat16)}


def engines(size: int, fixed_order: bool) -> list[TPGroup]:
    found: list[TPGroup] = []
    for rank in make_ranks(size):
        group = TPGroup.single()
        group.expert_exchange = ExpertExchange(rank)
        found.append(FixedOrder(group) if fixed_order else group)
    return found


def take(engine: ByHand, exchange: ExpertExchange | None, steps: Sequence[Step]) -> list[Tensor]:
    """What an engine computes in its own steps; it serves the others where it has none."""
    experts = [layer for layer in engine.model.modules() if isinstance(layer, Experts)]
    found = []
    for step in steps:
        if exchange is not None:
            exchange.begin(None if step is None else sum(map(len, step.values())))
        if step is not None:
            found.append(engine.step(step))
        elif exchange is not None:
            for layer in experts:
                layer.serve()
    return found


@pytest.mark.parametrize(
    ("family", "size"), each_once(with_slow(MIXTURES, [name for name in MIXTURES if name not in QUICK]), [2, 4])
)
def test_engines_that_share_experts_have_the_logits_of_the_whole_model(tmp_path, family, size):
    folder, groups = make_model(tmp_path, family), engines(size, fixed_order=False)
    parts = [load_by_hand(folder, group) for group in groups]
    found = on_all(groups, lambda i: take(parts[i], groups[i].expert_exchange, STEPS[i]))
    for logits, steps in zip(found, STEPS, strict=False):
        torch.testing.assert_close(logits, take(load_by_hand(folder), None, steps), atol=1e-4, rtol=0)
    held = [len(layer.split.own) for part in parts for layer in part.model.modules() if isinstance(layer, Experts)]
    whole = [len(layer.split.own) for layer in load_by_hand(folder).model.modules() if isinstance(layer, Experts)]
    assert sum(held) == sum(whole)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, dtype) in FAST else pytest.mark.slow)
        for family in MIXTURES
        for dtype in (torch.bfloat16, torch.float32)
    ],
)
def test_in_a_fixed_order_they_have_the_bits_of_one_engine(tmp_path, monkeypatch, family, dtype):
    monkeypatch.setattr(expert_split.SharedExpertsInOrder, "at_once", 7)  # so that a step takes several exchanges
    folder = make_model(tmp_path, family)
    alone = [take(load_by_hand(folder, FixedOrder(TPGroup.single()), dtype), None, steps) for steps in STEPS]
    for size in (2, 4):
        for logits, expected in zip(compute(folder, size, dtype), alone, strict=False):
            assert all(map(torch.equal, logits, expected))


def compute(folder: Path, size: int, dtype: torch.dtype) -> list[list[Tensor]]:
    groups = engines(size, fixed_order=True)
    parts = [load_by_hand(folder, group, dtype) for group in groups]
    return on_all(groups, lambda i: take(parts[i], groups[i].expert_exchange, STEPS[i]))


def test_before_the_first_step_all_engines_have_equally_many_rows():
    groups = engines(2, fixed_order=False)

    def exchange(i: int) -> tuple[Tensor, Tensor]:
        own = groups[i].expert_exchange
        assert own is not None
        ((start, counts),) = own.chunks(3, at_once=10)
        assert (start, counts) == (0, [3, 3])
        rows = own.gather(torch.full((3, 1), float(i)), counts)
        return rows, own.scatter(rows + 1, counts)

    for i, (rows, sums) in enumerate(on_all(groups, exchange)):
        assert rows.flatten().tolist() == [0.0] * 3 + [1.0] * 3
        assert sums.flatten().tolist() == [2.0 * (i + 1)] * 3


def test_an_engine_without_experts_of_its_own_and_models_without_a_mixture_are_refused(tmp_path):
    group = TPGroup.single()
    group.expert_exchange = ExpertExchange(make_ranks(4)[0])
    with pytest.raises(ConfigError, match="data_parallel must be at most the model's number of experts"):
        split_experts(3, 64, group)
    config = EngineConfig(data_parallel=2, expert_parallel=True)
    with pytest.raises(ConfigError, match="no experts to share; for independent engines, use replicas instead"):
        check_experts(config, ModelConfig.from_folder(make_model(tmp_path, "llama")))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"expert_parallel": False}, "data_parallel must be 1 without expert_parallel"),
        ({"tensor_parallel": 2}, "tensor_parallel must be 1 with data_parallel above 1"),
        ({"pipeline_parallel": 2}, "pipeline_parallel must be 1 with data_parallel above 1"),
        ({"enable_lora": True}, "enable_lora must be false with data_parallel above 1"),
        ({"torch_compile": True}, "torch_compile must be false with data_parallel above 1"),
        ({"data_parallel": 0}, "data_parallel must be at least 1"),
    ],
)
def test_what_data_parallel_engines_do_not_support_is_refused_by_name(options, error):
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{"data_parallel": 2, "expert_parallel": True, **options})
    assert error in str(raised.value)
