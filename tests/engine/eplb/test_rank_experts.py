"""What one rank counts and reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.eplb.open_experts import open_experts
from engine.eplb.rank_experts import NoExperts, RankExperts
from engine.model.expert_split import ExpertShardPlan, SpreadExperts
from engine.wire.parts.experts import ExpertOrder, ExpertStats

EXPERTS, LAYER = 6, 3
MEASURE = ExpertOrder(measure=True)


@pytest.fixture
def split() -> SpreadExperts:
    return SpreadExperts(EXPERTS, ExpertShardPlan(TPGroup(0, 2)))


@pytest.fixture
def rank(split) -> Iterator[RankExperts]:
    """The first of two ranks on a device that pads steps, as a GPU with graphs does."""
    device = Device(torch.device("cpu"))
    device.asynchronous = True
    layer = SimpleNamespace(split=split, num_experts=EXPERTS)
    rank = RankExperts({LAYER: layer}, TPGroup(0, 2), device, max_tokens=8, config=None)  # type: ignore[dict-item]
    yield rank
    rank.close()


def report(rank: RankExperts) -> ExpertStats:
    deadline = time.monotonic() + 60
    while not (found := rank.answers()):
        assert time.monotonic() < deadline, "no answer"
    (answer,) = found
    assert answer.load is not None
    return answer.load


def step(rank: RankExperts, split: SpreadExperts, rows: list[list[int]], num_tokens: int) -> None:
    rank.begin(None, num_tokens)
    split.load.add(torch.tensor(rows))


def test_padding_and_steps_before_the_reset_do_not_count(rank, split):
    step(rank, split, [[5, 4]] * 3, 3)
    rank.reset()
    step(rank, split, [[0, 1], [0, 3], [5, 5], [5, 5]], 2)  # the last two rows are padding
    step(rank, split, [[0, 2]], 1)
    rank.begin(MEASURE, 1)
    stats = report(rank)
    assert stats.rank_tokens == [5, 1]  # the first rank has experts 0, 1 and 2
    assert stats.balancedness == 3 / 5
    assert stats.top[0] == (LAYER, 0, 0.5)
    assert {expert for _, expert, _ in stats.top} == {0, 1, 2, 3}


def test_each_window_begins_anew_and_totals_go_on(rank, split):
    step(rank, split, [[0, 1]], 1)
    rank.begin(MEASURE, 1)
    assert report(rank).rank_tokens == [2, 0]
    step(rank, split, [[3, 4]], 1)
    rank.begin(MEASURE, 1)
    stats = report(rank)
    assert (stats.rank_tokens, stats.balancedness) == ([2, 2], 0.5)
    rank.begin(MEASURE, 1)  # nothing was computed
    assert report(rank) == ExpertStats(stage=0, rank_tokens=[2, 2], balancedness=1.0, top=[])


def test_a_rank_that_shares_no_whole_experts_counts_nothing():
    config, device = EngineConfig(tensor_parallel_size=2), Device(torch.device("cpu"))
    experts = open_experts(config, torch.nn.Module(), TPGroup(0, 2), device)
    assert type(experts) is NoExperts
    experts.begin(MEASURE, 1)
    experts.reset()
    assert experts.answers() == []
    experts.close()


def test_a_stage_without_experts_reports_no_load():
    config, device = EngineConfig(tensor_parallel_size=2, enable_expert_parallel=True), Device(torch.device("cpu"))
    experts = open_experts(config, torch.nn.Module(), TPGroup(0, 2), device)
    assert isinstance(experts, RankExperts)
    experts.begin(MEASURE, 1)
    assert report(experts) == ExpertStats(stage=0, rank_tokens=[0, 0], balancedness=1.0, top=[])
    experts.close()
