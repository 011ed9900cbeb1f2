"""When rank 0 lets ranks measure the load of experts, and when experts move."""

from __future__ import annotations

from engine.distributed.no_broadcaster import NoBroadcaster
from engine.options.experts import EPLBConfig
from engine.parts.experts.group_experts import GroupExperts
from engine.wire.parts.experts import ExpertAnswer, ExpertOrder, ExpertStats
from engine.wire.plan import StepPlan

MEASURE, COMMIT = ExpertOrder(measure=True), ExpertOrder(commit=True)
MOVE, STOP = ExpertOrder(measure=True, move=True), ExpertOrder(stop=True)
PLAN = StepPlan(step=1, added=[], blocks=[], slots=[], starts=[], counts=[], samples=[])


class Ranks:
    """The answers of all ranks."""

    def __init__(self) -> None:
        self.queue: list[ExpertAnswer] = []

    def answers(self) -> list[ExpertAnswer]:
        found, self.queue = self.queue, []
        return found


class Group(GroupExperts):
    def __init__(self, stages: int = 1, ranks: int = 2, **options: int):
        self.ranks = Ranks()
        config = EPLBConfig(**{"window_size": 3, "step_interval": 6, **options})
        super().__init__(self.ranks, NoBroadcaster(), config, stages=stages, ranks=ranks)  # type: ignore[arg-type]

    def orders(self, count: int, *answers: ExpertAnswer) -> list[ExpertOrder | None]:
        """The orders of the next steps. answers: what has been answered before them."""
        self.ranks.queue += answers
        return [self.mark(PLAN).record(ExpertOrder) for _ in range(count)]


def load(stage: int = 0) -> ExpertAnswer:
    return ExpertAnswer(load=ExpertStats(stage=stage, rank_tokens=[3, 1], balancedness=2 / 3, top=[]))


ARRIVED, DONE = ExpertAnswer(arrived=True), ExpertAnswer(done=True)


def test_each_window_is_measured_and_experts_move_after_the_first_and_then_once_per_interval():
    group = Group()
    assert group.orders(4) == [None, None, None, MOVE]
    assert group.orders(6, load(), DONE, DONE) == [None, None, MEASURE, None, None, MOVE]


def test_experts_that_do_not_move_are_measured():
    assert Group(ranks=0).orders(7) == [None, None, None, MEASURE, None, None, MEASURE]


def test_a_layer_is_used_once_all_ranks_have_its_experts():
    group = Group()
    group.orders(4)
    assert group.orders(1, load(), ARRIVED) == [None]
    assert group.orders(2, ARRIVED) == [COMMIT, MEASURE]
    assert group.orders(2, load(), ARRIVED, ARRIVED) == [COMMIT, None]


def test_stages_with_fewer_layers_that_move_do_not_keep_the_others_waiting():
    group = Group(stages=2, ranks=4)
    group.orders(4)
    assert group.orders(1, load(), load(1), *[ARRIVED] * 4) == [COMMIT]
    assert group.orders(1, ARRIVED, ARRIVED, DONE) == [None]
    assert group.orders(1, DONE) == [ExpertOrder(measure=True, commit=True)]
    assert group.orders(3, load(), load(1), DONE, DONE) == [None, None, MOVE]


def test_moves_that_are_not_done_are_not_joined_by_others():
    group = Group()
    group.orders(4)
    assert group.orders(9, load(), DONE) == [None, None, MEASURE] * 3


def test_when_a_rank_fails_all_are_told_once_and_nothing_moves_any_more(caplog):
    group = Group()
    group.orders(4)
    assert group.report().stages == []
    assert group.orders(1, load(), ARRIVED, ARRIVED, ExpertAnswer(failed="rank 1: no memory")) == [STOP]
    assert group.orders(8) == [None, MEASURE, None, None, MEASURE, None, None, MEASURE]
    assert [stats.stopped for stats in group.report().stages] == [True]
    assert caplog.messages == ["experts move no more on any rank: rank 1: no memory"]


def test_the_newest_load_of_each_stage_is_reported():
    group = Group(stages=2)
    group.orders(4)
    group.orders(1, load(1), load(0))
    assert [stats.stage for stats in group.report().stages] == [0, 1]
