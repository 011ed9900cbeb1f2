"""Engines that share the experts of a model: each has the logits of the whole model for its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.assembly.open_setup import open_setup
from engine.config import EngineConfig
from engine.distributed.exchange.all_gather import AllGather
from engine.distributed.exchange.all_to_all import AllToAll
from engine.distributed.exchange.expert_exchange import ExpertExchange, StepSize
from engine.distributed.exchange.members import PER_RANK
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.model import expert_split
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts, choose_backend
from engine.model.expert_split import ExpertShardPlan, split_experts
from engine.model.fixed_order import in_fixed_order
from engine.model.layers.moe import Experts
from engine.model.shard import ShardPlan
from tests.batches import ByHand, load_by_hand
from tests.engine.model.test_expert_parallel import MIXTURES, QUICK
from tests.late_device import LateDevice
from tests.models import make_model
from tests.products import each_once, few, in_turns, pairwise, slow
from tests.ranks import make_ranks, on_all

Step = dict[int, list[int]] | None

#: What each engine computes, step by step: unequal numbers of tokens, and now and then none.
STEPS: list[list[Step]] = [
    [{0: list(range(20)), 1: [5, 6, 7]}, {0: [9], 1: [8, 11]}, None, {0: [3]}],
    [None, {0: list(range(30, 41))}, {0: [4]}, {0: [2], 1: [1, 2, 3]}],
    [{0: [7]}, None, {0: [8, 9]}, None],
    [None, None, {0: [5, 6, 7, 8, 9]}, {0: [1]}],
]

LIKE_OTHERS = [name for name in MIXTURES if name not in QUICK]
LAYOUTS = [(2, 1), (4, 1), (2, 2)]  # engines, and ranks of each
EXCHANGES = [AllGather, AllToAll]


def engines(size: int, fixed_order: bool, ranks: int = 1, exchange: Any = AllGather) -> list[ShardPlan]:
    """All ranks of all engines."""
    found: list[ShardPlan] = []
    own = [rank for _ in range(size) for rank in make_ranks(ranks)]
    for group, everyone in zip(own, make_ranks(size * ranks), strict=True):
        shared = ExpertExchange(everyone, ranks_per_engine=ranks, open_exchange=exchange)
        plan = ExpertShardPlan(group, expert_exchange=shared)
        found.append(in_fixed_order(plan) if fixed_order else plan)
    return found


def take(engine: ByHand, exchange: ExpertExchange | None, steps: Sequence[Step]) -> list[Tensor]:
    """What an engine computes in its own steps; it serves the others where it has none."""
    experts = [layer for layer in engine.model.modules() if isinstance(layer, Experts)]
    found = []
    for step in steps:
        if exchange is not None:
            exchange.begin(None if step is None else StepSize(sum(map(len, step.values()))))
        if step is not None:
            found.append(engine.step(step))
        elif exchange is not None:
            for layer in experts:
                layer.serve()
    return found


@pytest.mark.parametrize(
    ("family", "layout", "exchange"),
    few(2, each_once(QUICK, LAYOUTS, EXCHANGES)) + in_turns(slow(LIKE_OTHERS), LAYOUTS, EXCHANGES),
)
def test_engines_that_share_experts_have_the_logits_of_the_whole_model(tmp_path, family, layout, exchange):
    (size, ranks), folder = layout, make_model(tmp_path, family)
    groups = engines(size, fixed_order=False, ranks=ranks, exchange=exchange)
    parts = [load_by_hand(folder, group) for group in groups]
    found = on_all(groups, lambda i: take(parts[i], groups[i].expert_exchange, STEPS[i // ranks]))
    alone = [take(load_by_hand(folder), None, steps) for steps in STEPS[:size]]
    for i, logits in enumerate(found):
        torch.testing.assert_close(logits, alone[i // ranks], atol=1e-4, rtol=0)
    held = [len(layer.split.own) for part in parts for layer in part.model.modules() if isinstance(layer, Experts)]
    whole = [len(layer.split.own) for layer in load_by_hand(folder).model.modules() if isinstance(layer, Experts)]
    assert sum(held) == sum(whole)


@pytest.mark.parametrize(
    ("family", "dtype"),
    pairwise([QUICK[0], *slow(QUICK[1:])], [torch.bfloat16, *slow([torch.float32])])
    + in_turns(slow(LIKE_OTHERS), [torch.bfloat16, torch.float32]),
)
def test_in_a_fixed_order_they_have_the_bits_of_one_engine(tmp_path, monkeypatch, family, dtype):
    monkeypatch.setattr(expert_split.SharedExpertsInOrder, "at_once", 7)  # so that a step takes several exchanges
    folder = make_model(tmp_path, family)
    alone = [take(load_by_hand(folder, in_fixed_order(ShardPlan()), dtype), None, steps) for steps in STEPS]
    for (size, ranks), exchange in product(LAYOUTS, EXCHANGES):
        for i, logits in enumerate(compute(folder, size, ranks, dtype, exchange)):
            assert all(map(torch.equal, logits, alone[i // ranks])), (size, ranks, exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_row_has_the_same_bits_wherever_it_is_in_a_step_of_an_engine_with_two_ranks(tmp_path, exchange):
    """Each rank gets what the experts make of a share of the rows, and adds its part of the shared expert."""
    folder = make_model(tmp_path, "glm4_moe")

    def logits(step: Step, of_other_engine: Step) -> Tensor:
        groups = engines(2, fixed_order=False, ranks=2, exchange=exchange)
        parts, steps = [load_by_hand(folder, group) for group in groups], [step, step, of_other_engine, of_other_engine]
        return on_all(groups, lambda i: take(parts[i], groups[i].expert_exchange, [steps[i]]))[0][0]

    alone = logits({0: [7]}, None)
    for before in ([9], [8, 9, 11], list(range(20, 40))):
        assert torch.equal(logits({1: before, 0: [7]}, {0: before})[-1], alone[0])


def compute(folder: Path, size: int, ranks: int, dtype: torch.dtype, exchange: Any) -> list[list[Tensor]]:
    groups = engines(size, fixed_order=True, ranks=ranks, exchange=exchange)
    parts = [load_by_hand(folder, group, dtype) for group in groups]
    return on_all(groups, lambda i: take(parts[i], groups[i].expert_exchange, STEPS[i // ranks]))


def test_before_the_first_step_all_engines_have_equally_many_rows():
    own = engines(2, fixed_order=False)[1].expert_exchange
    assert own is not None
    assert list(own.chunks(3, at_once=10)) == [(0, [3, 3])]
    assert list(own.chunks(3, at_once=2)) == [(0, [2, 2]), (2, [1, 1])]


def test_an_engine_without_experts_of_its_own_and_models_without_a_mixture_are_refused(tmp_path):
    alone = ExpertShardPlan(expert_exchange=ExpertExchange(make_ranks(4)[0]))
    with pytest.raises(ConfigError, match="data_parallel_size must be at most the model's number of experts"):
        split_experts(3, 64, alone)
    exchange = ExpertExchange(make_ranks(4)[1], ranks_per_engine=2)
    pair = ExpertShardPlan(make_ranks(2)[1], expert_exchange=exchange)
    with pytest.raises(
        ConfigError, match=r"data_parallel_size \* tensor_parallel_size must be at most the model's number of exp"
    ):
        split_experts(3, 64, pair)
    config = EngineConfig(data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="no experts to share; for independent engines, use replicas instead"):
        check_experts(config, ModelConfig.from_folder(make_model(tmp_path, "llama")))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"enable_expert_parallel": False}, "data_parallel_size must be 1 without enable_expert_parallel"),
        (
            {"pipeline_parallel_size": 2, "enable_eplb": True},
            "enable_eplb must be false with both data_parallel_size and pipeline_parallel_size above 1",
        ),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        (
            {"data_parallel_size": 1, "all2all_backend": "alltoall"},
            "all2all_backend must be auto without data_parallel_size above 1",
        ),
        ({"all2all_backend": "pplx"}, "all2all_backend must be one of auto, allgather_reducescatter, alltoall"),
    ],
)
def test_what_data_parallel_engines_do_not_support_is_refused_by_name(options, error):
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{"data_parallel_size": 2, "enable_expert_parallel": True, **options})
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("ranks", "on_gpu", "backend", "why"),
    [
        (16, True, "allgather_reducescatter", "the host need not wait for the GPU, and CUDA graphs can hold it"),
        (2, False, "allgather_reducescatter", "two ranks would send as much by all-to-all, in more exchanges"),
        (3, False, "alltoall", "tokens go only to the ranks that have their experts"),
    ],
)
def test_auto_sends_tokens_to_all_ranks_only_where_this_takes_less_time(ranks, on_gpu, backend, why):
    assert choose_backend("auto", ranks, on_gpu=on_gpu) == (backend, why)
    assert choose_backend("alltoall", ranks, on_gpu=on_gpu) == ("alltoall", "it is configured")


def test_stages_of_engines_on_gpus_are_refused_since_they_could_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.runner.rank_setup.open_device", lambda name: LateDevice())
    config = EngineConfig(data_parallel_size=2, enable_expert_parallel=True, pipeline_parallel_size=2)
    model = ModelConfig.from_folder(make_model(tmp_path, "qwen3_moe"))
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be 1 on a GPU with data_parallel_size above 1"):
        open_setup(config, model, tmp_path, TPGroup.single())


def test_what_an_aborted_collective_returns_names_no_expert_that_does_not_exist():
    split = expert_split.SharedExperts(8, ExpertShardPlan(), ExpertExchange(make_ranks(2)[1]))
    found = split.slots.at(torch.tensor([[-(2**31), 0, PER_RANK - 1], [PER_RANK + 3, PER_RANK + 4, 2**31 - 1]]))
    assert found.tolist() == [[4, 4, 4], [3, 4, 4]]
