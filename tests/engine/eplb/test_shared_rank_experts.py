"""What each rank of engines that share experts decides, from the states of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.eplb.rank_experts import IDLE
from engine.eplb.shared_rank_experts import ARRIVED, FAILED, MOVING, SharedRankExperts
from engine.options.experts import EPLBConfig
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder, ExpertStats

NOTHING, MEASURE, COMMIT = ExpertOrder(), ExpertOrder(measure=True), ExpertOrder(commit=True)
MOVE, STOP = ExpertOrder(measure=True, move=True), ExpertOrder(stop=True)


def joined(rank: int, size: int) -> TPGroup:
    """Ranks that have nothing to send."""
    ranks = TPGroup(rank, size)
    ranks.process_group = lambda name, timeout_s, on_hosts: None  # type: ignore[method-assign, assignment]
    return ranks


class Rank(SharedRankExperts):
    """A rank that only notes what it decides."""

    def __init__(self, number: int, moves: bool = True):
        ranks, eplb = joined(number, 2), EPLBConfig(window_size=2, step_interval=4)
        config = EngineConfig(data_parallel_size=2, enable_expert_parallel=True, enable_eplb=moves, eplb_config=eplb)
        super().__init__({}, ranks, Device(torch.device("cpu")), config)
        self.orders: list[ExpertOrder] = []

    def _obey(self, order: ExpertOrder) -> None:
        self.orders.append(order)

    def hear(self, **answer: object) -> None:
        self._answers.put(ExpertAnswer(**answer))


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    found = [Rank(0), Rank(1)]
    yield found
    for rank in found:
        rank.close()


def take(ranks: list[Rank], count: int = 1) -> list[ExpertOrder]:
    """The orders of the next steps, which all ranks have to give alike."""
    for rank in ranks:
        rank.orders.clear()
    for _ in range(count):
        states = [rank.tell() for rank in ranks]
        for rank in ranks:
            rank.turn(states)
    assert ranks[0].orders == ranks[-1].orders
    return list(ranks[0].orders)


def test_experts_are_used_before_the_step_by_which_all_ranks_have_them(ranks):
    assert take(ranks, 3) == [NOTHING, NOTHING, MOVE]
    assert [rank.tell() for rank in ranks] == [MOVING, MOVING]
    ranks[1].hear(arrived=True)
    assert take(ranks) == [NOTHING]
    ranks[0].hear(arrived=True)
    assert [rank.tell() for rank in ranks] == [ARRIVED, ARRIVED]
    assert take(ranks) == [ExpertOrder(measure=True, commit=True)]
    assert take(ranks, 2) == [NOTHING, MEASURE], "the next layer is on its way"
    for rank in ranks:
        rank.hear(done=True)
    assert [rank.tell() for rank in ranks] == [IDLE, IDLE]
    assert take(ranks, 2) == [NOTHING, MOVE]


def test_experts_do_not_move_again_before_all_ranks_are_done(ranks):
    take(ranks, 3)
    ranks[0].hear(done=True)
    assert take(ranks, 4) == [NOTHING, MEASURE, NOTHING, MEASURE]


def test_if_one_rank_fails_all_stop_at_the_same_step_and_the_first_rank_tells(ranks, caplog):
    take(ranks, 3)
    ranks[0].hear(load=ExpertStats(stage=0, rank_tokens=[3, 1], balancedness=2 / 3, top=[]))
    ranks[0].hear(arrived=True)
    ranks[1].hear(arrived=True)
    ranks[1].hear(failed="rank 1: no memory")
    assert [rank.tell() for rank in ranks] == [ARRIVED, FAILED]
    assert not ranks[0].stats[0].stopped
    assert take(ranks) == [STOP]
    assert take(ranks, 6) == [MEASURE, NOTHING] * 3
    assert [rank.tell() for rank in ranks] == [FAILED, FAILED]
    assert ranks[0].stats[0].stopped and not ranks[1].stats
    assert "experts move no more on any rank: rank 1: no memory" in caplog.messages


def test_experts_that_do_not_move_are_measured():
    rank = Rank(0, moves=False)
    for _ in range(5):
        rank.turn([rank.tell(), IDLE])
    assert rank.orders == [NOTHING, NOTHING, MEASURE, NOTHING, MEASURE]
    rank.close()
