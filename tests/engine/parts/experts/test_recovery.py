"""Engines that go on when one of them is lost: threads that launch steps, whose steps only note themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.distributed.data_parallel import survivors
from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.data_parallel.roster import Roster
from engine.distributed.exchange.expert_exchange import StepSize
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.eplb.rank_experts import NoExperts
from engine.errors import EngineUnavailable
from engine.parts.experts.rank.recovery import NoRecovery, Recovery
from engine.parts.experts.rank.shared_rank import SharedRank
from engine.parts.experts.rank.wave_launcher import FollowingLauncher, WaveLauncher
from engine.runner.graphs.cuda_graphs import NoGraphs
from tests.engine.offline.test_rank_processes import wait_until

TIMEOUT_S = 30.0
STATES: list[Any] = ["states"]


class Engine:
    """An engine, or one of its ranks."""

    def __init__(self, group: DataParallelGroup, elastic: bool):
        self.group, self.steps, self.put_back = group, list[str](), list[Any]()
        self.fails: BaseException | None = None
        self.fails_after: Callable[[], object] = lambda: True
        device = Device(torch.device("cpu"))
        runner: Any = SimpleNamespace(device=device, launch=self._launch)
        setup: Any = SimpleNamespace(config=EngineConfig(), folder=Path(), device=device, torch_device="cpu")
        states: Any = SimpleNamespace(keep=lambda plan: STATES, put_back=self.put_back.append)
        rank = SharedRank(runner, setup, nn.Module(), states, NoGraphs(), NoExperts())  # type: ignore[arg-type]
        self.recovery = (Recovery if elastic else NoRecovery)(rank, group)
        self.launcher = (FollowingLauncher if group.rank else WaveLauncher)(rank, group, self.recovery)

    def _launch(self, inputs: Any) -> Any:
        if (error := self.fails) is not None:
            wait_until(self.fails_after)
            self.fails = None
            raise error
        self.steps.append(inputs.name)
        return inputs.name

    def launch(self, name: str) -> Future[Any]:
        inputs = SimpleNamespace(name=name, token_index=[0], prepared=None, plan=SimpleNamespace(slots=[0]))
        return self.launcher.launch(inputs)  # type: ignore[arg-type, return-value]

    def run(self, name: str) -> None:
        """Take a step, and rest."""
        assert self.launch(name).result(TIMEOUT_S) == name
        self.launcher.rest()

    def die(self) -> None:
        """Take part in nothing any more, without a word to anybody."""
        self.launcher.close()
        self.group.all_engines.leave("it is dead")


@contextmanager
def engines(
    size: int, elastic: bool = True, ranks_per_engine: int = 1, **options: Any
) -> Iterator[tuple[list[Engine], Roster]]:
    """All ranks. size: of all engines together."""
    options = {"device": "cpu", **options}
    first = TPGroup.listen(size, **options)
    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(TPGroup.connect, r, size, first.address, TIMEOUT_S, **options) for r in range(1, size)]
        first.join(TIMEOUT_S)
        ranks = [first, *(other.result() for other in others)]
        groups = pool.map(lambda rank: DataParallelGroup(rank, ranks_per_engine), ranks)
        found = [Engine(group, elastic) for group in groups]
    roster = Roster(found[0].group.waves.addresses, None, ranks_per_engine)
    try:
        yield found, roster
    finally:
        roster.close()
        for engine in found:
            engine.launcher.close()
        for engine in found:
            engine.group.close()


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("victim", [0, 2])  # the one at whose store they have met, and another
def test_a_step_that_a_loss_interrupts_is_launched_again_by_the_engines_that_are_left(victim, shared_memory):
    with engines(4, shared_memory=shared_memory) as (found, roster):
        found[1].run("before")
        found[victim].die()
        left = [engine for engine in found if engine is not found[victim]]
        launched = [engine.launch("during") for engine in left]
        assert roster.lose(victim, f"engine {victim} died")
        for step in launched:
            assert step.result(TIMEOUT_S) == "during"
        for engine in left:
            engine.run("after")
            shared = engine.launcher.report()
            assert (shared.generation, shared.engines) == (1, 3) and shared.pause_s > 0
        assert [engine.steps[-2:] for engine in left] == [["during", "after"]] * 3


def test_a_step_that_fails_within_an_exchange_is_launched_again_with_the_states_from_before():
    with engines(2) as (found, roster):
        found[0].fails = EngineUnavailable("rank 1 is gone")
        launched = found[0].launch("a")
        wait_until(lambda: found[0].fails is None)
        found[1].die()
        roster.lose(1, "engine 1 died")
        assert launched.result(TIMEOUT_S) == "a"
        assert found[0].steps == ["a"] and found[0].put_back == [STATES]
        assert found[0].launcher.report().engines == 1


def test_engines_without_requests_notice_a_loss_and_go_on():
    with engines(3) as (found, roster):
        found[1].die()
        roster.lose(1, "engine 1 died")
        wait_until(lambda: [engine.recovery.generation for engine in found] == [1, 0, 1])
        found[2].run("a")
        found[0].run("b")


def test_a_second_engine_that_dies_while_the_others_meet_is_left_behind_too():
    with engines(4) as (found, roster):
        launched = [found[number].launch("a") for number in (0, 3)]
        found[1].die()
        found[2].die()  # the order that follows counts on it
        roster.lose(1, "engine 1 died")
        wait_until(lambda: found[0].recovery._survivors._ranks.size == 3)  # type: ignore[attr-defined]
        roster.lose(2, "engine 2 died")
        assert [step.result(TIMEOUT_S) for step in launched] == ["a", "a"]
        assert found[3].launcher.report().engines == 2 and found[3].recovery.generation == 2


def test_a_first_member_that_has_died_since_it_told_where_to_meet_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(survivors, "MEET_S", 600.0)
    monkeypatch.setattr(survivors, "REACH_S", 0.1)
    with engines(3) as (found, roster):
        found[0].die()
        found[1].die()
        launched = found[2].launch("a")
        found[1].group.waves.tell(survivors.Meet(1, "127.0.0.1:1"))  # where nobody listens
        roster.lose(0, "engine 0 died")
        wait_until(lambda: found[2].recovery._survivors.generation == 1)  # type: ignore[attr-defined]
        roster.lose(1, "engine 1 died")
        assert launched.result(TIMEOUT_S) == "a"
        assert found[2].launcher.report().engines == 1


def test_an_engine_whose_step_fails_tells_the_others_at_once_and_they_go_on_without_it():
    with engines(3) as (found, roster):
        found[1].fails = ValueError("out of memory")
        launched = [found[0].launch("a"), found[2].launch("a")]
        with pytest.raises(ValueError, match="out of memory"):
            found[1].launch("a").result(TIMEOUT_S)
        wait_until(lambda: all(found[number].recovery.lost for number in (0, 2)))
        roster.lose(1, "its process has ended")
        assert [step.result(TIMEOUT_S) for step in launched] == ["a", "a"]


def test_engines_that_end_together_learn_of_a_failure_at_once_even_if_they_wait_for_nothing():
    with engines(3, elastic=False) as (found, _):
        found[1].fails = ValueError("out of memory")
        with pytest.raises(ValueError, match="out of memory"):
            found[1].launch("a").result(TIMEOUT_S)
        for engine in (found[0], found[2]):
            wait_until(lambda engine=engine: engine.launcher._broken is not None)
            with pytest.raises(EngineUnavailable, match="out of memory"):
                engine.launcher.rest()


def test_no_step_begins_once_another_engine_is_lost_whatever_sizes_were_told():
    with engines(2) as (found, roster):
        engine, exchange = found[0], found[0].group.expert_exchange
        begin = exchange.begin

        def aborted(size: StepSize | None, state: int = 0) -> bool:
            """Tell sizes just before the loss, of which the collectives of a GPU raise no error."""
            if engine.recovery.generation == 1:
                return begin(size, state)
            engine.recovery.hear(survivors.Lost(0, "engine 1 died"))
            exchange.sizes = [StepSize(1)] * 2
            return True

        exchange.begin = aborted  # type: ignore[method-assign]
        launched = engine.launch("a")
        wait_until(lambda: engine.recovery.lost)
        found[1].die()
        roster.lose(1, "engine 1 died")
        assert launched.result(TIMEOUT_S) == "a"
        assert engine.launcher.report().generation == 1, "not before"


def test_gpus_of_engines_that_go_on_share_no_memory_since_nothing_ends_their_waits_in_it():
    for device, elastic, shared in (("cuda", True, False), ("cuda", False, True), ("cpu", True, True)):
        config = EngineConfig(
            device=device, data_parallel_size=2, enable_expert_parallel=True, enable_elastic_ep=elastic
        )
        assert group_options(config)["shared_memory"] is shared


def sleep(ranks: list[Engine]) -> None:
    """Wait until no wave is under way."""
    for rank in ranks:
        rank.launcher.rest()
    wait_until(lambda: all(rank.launcher._awaits for rank in ranks))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("victim", [1, 2])  # of the engine at whose store they have met, and of another
def test_an_engine_with_several_ranks_is_lost_with_any_of_them(victim, shared_memory):
    with engines(6, ranks_per_engine=2, shared_memory=shared_memory) as (found, roster):
        left = [rank for rank in found if rank.group.engine != victim // 2]
        for rank in left:
            rank.launch("before")
        found[victim].die()
        launched = [rank.launch("during") for rank in left]
        assert roster.lose(victim // 2, f"rank {victim} died")
        assert [step.result(TIMEOUT_S) for step in launched] == ["during"] * 4
        after = [rank.launch("after") for rank in left]
        assert [step.result(TIMEOUT_S) for step in after] == ["after"] * 4
        shared = left[0].launcher.report()
        assert (shared.generation, shared.engines) == (1, 2)
        other = found[victim ^ 1]
        wait_until(lambda: other.launcher._broken is not None)
        with pytest.raises(EngineUnavailable, match="the other engines go on without this one"):
            other.launch("later")
        sleep(left)


def test_a_step_that_only_some_ranks_of_an_engine_have_computed_is_launched_again_by_all_of_them():
    with engines(4, ranks_per_engine=2) as (found, roster):
        found[1].fails, found[1].fails_after = EngineUnavailable("rank 2 is gone"), lambda: found[0].steps
        launched = [found[number].launch("a") for number in (0, 1)]
        wait_until(lambda: found[1].fails is None)
        found[2].die()
        roster.lose(1, "engine 1 died")
        assert [step.result(TIMEOUT_S) for step in launched] == ["a", "a"]
        assert [found[number].steps for number in (0, 1)] == [["a", "a"], ["a"]]
        assert [found[number].put_back[-1] for number in (0, 1)] == [STATES, STATES]
        sleep(found[:2])


def test_a_step_that_all_ranks_of_an_engine_have_computed_is_not_launched_again():
    with engines(4, ranks_per_engine=2) as (found, roster):
        group, all_reduce = found[1].group, found[1].group.all_reduce

        def interrupted(x: Tensor) -> Tensor:
            group.all_reduce = all_reduce  # type: ignore[method-assign]
            all_reduce(x)
            raise EngineUnavailable("rank 2 is gone")

        group.all_reduce = interrupted  # type: ignore[method-assign]
        launched = [found[number].launch("a") for number in (0, 1)]
        assert launched[0].result(TIMEOUT_S) == "a", "it has not noticed"
        found[2].die()
        roster.lose(1, "engine 1 died")
        assert launched[1].result(TIMEOUT_S) == "a"
        later = [found[number].launch("b") for number in (0, 1)]
        assert [step.result(TIMEOUT_S) for step in later] == ["b", "b"]
        assert [found[number].steps for number in (0, 1)] == [["a", "b"], ["a", "b"]]
        assert not any(STATES in found[number].put_back for number in (0, 1))
        sleep(found[:2])


def test_if_nobody_says_who_goes_on_the_engines_end_with_the_reason(monkeypatch):
    monkeypatch.setattr(survivors, "ORDER_S", 0.1)
    with engines(2) as (found, _):
        launched = found[0].launch("a")
        found[1].die()
        with pytest.raises(EngineUnavailable, match="rank 1 is gone; nobody has said within 0 s which engines go on"):
            launched.result(TIMEOUT_S)


def test_an_engine_that_was_taken_for_dead_ends():
    with engines(3) as (found, roster):
        roster.lose(1, "no word from it")
        wait_until(lambda: found[1].launcher._broken is not None)
        with pytest.raises(EngineUnavailable, match="the other engines go on without this one: no word from it"):
            found[1].launch("a")
        launched = [found[0].launch("a"), found[2].launch("a")]
        assert [step.result(TIMEOUT_S) for step in launched] == ["a", "a"]


def test_messages_about_an_earlier_generation_are_ignored():
    with engines(3) as (found, roster):
        found[1].die()
        roster.lose(1, "engine 1 died")
        wait_until(lambda: [engine.recovery.generation for engine in found] == [1, 0, 1])
        found[2].recovery.hear(survivors.Lost(0, "an old story"))
        assert found[2].recovery.lost is None
        found[2].run("a")
