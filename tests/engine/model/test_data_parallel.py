"""Engines that share the experts of a model: each has the logits of the whole model for its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from tests.models import make_model
from tests.products import each_once, in_turns, pairwise, slow
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


def engines(size: int, fixed_order: bool, ranks: int = 1) -> list[TPGroup]:
    """All ranks of all engines."""
    found: list[TPGroup] = []
    own = [rank for _ in range(size) for rank in make_ranks(ranks)]
    for group, everyone in zip(own, make_ranks(size * ranks), strict=True):
        group.expert_exchange = ExpertExchange(everyone, ranks_per_engine=ranks)
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


@pytest.mark.parametrize(("family", "layout"), each_once(QUICK, LAYOUTS) + in_turns(slow(LIKE_OTHERS), LAYOUTS))
def test_engines_that_share_experts_have_the_logits_of_the_whole_model(tmp_path, family, layout):
    (size, ranks), folder = layout, make_model(tmp_path, family)
    groups = engines(size, fixed_order=False, ranks=ranks)
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
    alone = [take(load_by_hand(folder, FixedOrder(TPGroup.single()), dtype), None, steps) for steps in STEPS]
    for size, ranks in LAYOUTS:
        for i, logits in enumerate(compute(folder, size, ranks, dtype)):
            assert all(map(torch.equal, logits, alone[i // ranks]))


def compute(folder: Path, size: int, ranks: int, dtype: torch.dtype) -> list[list[Tensor]]:
    groups = engines(size, fixed_order=True, ranks=ranks)
    parts = [load_by_hand(folder, group, dtype) for group in groups]
    return on_all(groups, lambda i: take(parts[i], groups[i].expert_exchange, STEPS[i // ranks]))


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


def test_ranks_of_an_engine_send_a_share_of_its_rows_each_and_get_it_back():
    groups = engines(2, fixed_order=False, ranks=2)

    def exchange(i: int) -> tuple[Tensor, Tensor, Tensor]:
        own, counts = groups[i].expert_exchange, [3, 2]
        assert own is not None
        rows = torch.tensor([[1.0], [2.0], [3.0]] if i < 2 else [[4.0], [5.0]])
        assert own.begin(len(rows) if i % 2 == 0 else None) and own.has_step
        gathered = own.gather(rows, counts)
        parts = torch.stack([gathered, gathered * 10])
        return gathered, own.scatter(gathered, counts), own.scatter_parts(parts, counts)

    found = on_all(groups, exchange)
    assert [rows.flatten().tolist() for rows, _, _ in found] == [[1, 2, 3, 4, 5]] * 4
    assert [sums.flatten().tolist() for _, sums, _ in found] == [[4, 8, 0], [0, 0, 12], [16, 20], [0, 0]]
    assert [part.flatten().tolist() for _, _, part in found] == [[4, 8, 12], [40, 80, 120], [16, 20], [160, 200]]


def test_a_rank_sends_as_much_as_planning_counts():
    groups, tokens, row = engines(2, fixed_order=False, ranks=2), 4, 8 * 4

    def exchange(i: int) -> int:
        own = groups[i].expert_exchange
        assert own is not None
        own.scatter(torch.ones(2 * tokens, 8), [tokens, tokens])
        return own._ranks.scattered_bytes  # type: ignore[attr-defined]

    assert on_all(groups, exchange) == [(2 - 1 / 2) * row * tokens] * 4  # cluster/planning/layouts.py


def test_an_engine_without_experts_of_its_own_and_models_without_a_mixture_are_refused(tmp_path):
    group = TPGroup.single()
    group.expert_exchange = ExpertExchange(make_ranks(4)[0])
    with pytest.raises(ConfigError, match="data_parallel must be at most the model's number of experts"):
        split_experts(3, 64, group)
    pair = make_ranks(2)[1]
    pair.expert_exchange = ExpertExchange(make_ranks(4)[1], ranks_per_engine=2)
    with pytest.raises(
        ConfigError, match=r"data_parallel \* tensor_parallel must be at most the model's number of exp"
    ):
        split_experts(3, 64, pair)
    config = EngineConfig(data_parallel=2, expert_parallel=True)
    with pytest.raises(ConfigError, match="no experts to share; for independent engines, use replicas instead"):
        check_experts(config, ModelConfig.from_folder(make_model(tmp_path, "llama")))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"expert_parallel": False}, "data_parallel must be 1 without expert_parallel"),
        (
            {"pipeline_parallel": 2, "enable_elastic_ep": True},
            "enable_elastic_ep must be false with both data_parallel and pipeline_parallel above 1",
        ),
        (
            {"pipeline_parallel": 2, "enable_eplb": True},
            "enable_eplb must be false with both data_parallel and pipeline_parallel above 1",
        ),
        ({"data_parallel": 0}, "data_parallel must be at least 1"),
    ],
)
def test_what_data_parallel_engines_do_not_support_is_refused_by_name(options, error):
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{"data_parallel": 2, "expert_parallel": True, **options})
    assert error in str(raised.value)


def test_what_an_aborted_collective_returns_names_no_expert_that_does_not_exist():
    exchange: Any = SimpleNamespace(rank=0, size=2, gather=lambda rows, counts: torch.full_like(rows, 127))
    split = expert_split.SharedExperts(8, TPGroup.single(), exchange)
    x, experts, weights = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    _, local, _ = split._gather([3, 0], x, experts, weights)
    assert ((local >= 0) & (local <= split.num_slots)).all()
