"""What each rank of engines that share experts decides, from the states of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
import torch

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.distributed.tp_group import TPGroup
from engine.eplb import shared_rank_experts
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


def test_after_a_loss_the_first_rank_that_is_left_reports_the_load_of_those_that_are_left():
    rank = Rank(1, moves=False)
    rank._numbers, rank._sizes, rank._placements = [0], [4], [[[0, 1], [2, 3]]]
    load = torch.tensor([[4, 0, 1, 1]]), rank._device.event(), False
    rank._measurer.submit(rank._measure, *load).result()
    rank.tell()
    assert not rank.stats, "the other rank reports it"
    rank.use(TPGroup(0, 1), [[[2, 3, 0, 1]]])
    rank._measurer.submit(rank._measure, *load).result()
    rank.tell()
    assert [(stats.rank_tokens, stats.balancedness) for stats in rank.stats] == [([6], 1.0)]
    rank.close()


def test_after_a_loss_experts_move_again_between_the_ranks_that_are_left(ranks):
    take(ranks, 3)
    ranks[0].hear(arrived=True)  # from a rank that is lost now
    ranks[0].use(joined(0, 1), [])
    assert ranks[0].tell() == IDLE
    assert take(ranks[:1], 3) == [NOTHING, NOTHING, MOVE]


def test_experts_that_moved_no_more_before_a_loss_do_not_afterwards(ranks, caplog):
    take(ranks, 3)
    ranks[1].hear(failed="rank 1: no memory")
    assert take(ranks) == [STOP]
    ranks[0].use(joined(0, 1), [])
    assert ranks[0].tell() == FAILED
    assert take(ranks[:1], 6) == [NOTHING, NOTHING, MEASURE, NOTHING, MEASURE, NOTHING]
    assert "experts move no more on any rank: they had stopped before an engine was lost" in caplog.messages


def test_a_mover_that_does_not_end_stops_all_moves(ranks, monkeypatch, caplog):
    monkeypatch.setattr(shared_rank_experts, "END_S", 0.05)
    ended = Event()
    ranks[0]._mover.submit(ended.wait, 60)
    ranks[0].use(joined(0, 1), [])
    ended.set()
    assert ranks[0].tell() == FAILED
    assert "experts move no more on any rank: rank 0 still waited for a lost one after 0 s" in caplog.messages
