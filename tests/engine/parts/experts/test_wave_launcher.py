"""Threads that launch the steps of engines which share experts: they step together, and sleep together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from engine.distributed.data_parallel.data_parallel_group import DataParallelGroup
from engine.distributed.data_parallel.waves import Wave
from engine.distributed.exchange.expert_exchange import StepSize
from engine.distributed.tp_group import TPGroup
from engine.eplb.rank_experts import NoExperts
from engine.errors import EngineUnavailable
from engine.parts.experts.rank import wave_launcher
from engine.parts.experts.rank.wave_launcher import FollowingLauncher, WaveLauncher
from engine.runner.graphs.cuda_graphs import NoGraphs
from tests.engine.offline.test_rank_processes import wait_until

TIMEOUT_S = 30.0


class Engine:
    """One of several engines whose steps only note themselves."""

    def __init__(self, group: DataParallelGroup):
        self.group, self.steps, self.begun = group, list[str](), list[int | None]()
        self.fails = False
        exchange = group.expert_exchange
        assert exchange is not None
        begin = exchange.begin

        def noting(size: StepSize | None, state: int) -> bool:
            self.begun.append(None if size is None else size.tokens)
            return begin(size, state)

        exchange.begin = noting  # type: ignore[method-assign]
        runner: Any = SimpleNamespace(device=SimpleNamespace(set_current=lambda: None), launch=self._launch)
        model: Any = nn.Module()
        launcher = WaveLauncher if group.leads else FollowingLauncher
        self.launcher: WaveLauncher = launcher(runner, group, model, NoGraphs(), NoExperts())

    def _launch(self, inputs: Any) -> Any:
        if self.fails:
            raise ValueError("a step failed")
        self.steps.append(inputs.name)
        return inputs.name

    def launch(self, name: str, rows: int = 1) -> Any:
        return self.launcher.launch(SimpleNamespace(name=name, token_index=[0] * rows, prepared=None))  # type: ignore[arg-type]

    def close(self) -> None:
        self.launcher.close()
        self.group.close()


@contextmanager
def engines(size: int, ranks: int = 1) -> Iterator[list[Engine]]:
    """All ranks. size: of all engines together. ranks: of each."""
    first = TPGroup.listen(size, device="cpu")
    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(TPGroup.connect, r, size, first.address, TIMEOUT_S, device="cpu") for r in range(1, size)]
        first.join(TIMEOUT_S)
        joined = [first, *(other.result() for other in others)]
        found = [Engine(group) for group in pool.map(lambda rank: DataParallelGroup(rank, ranks), joined)]
    try:
        yield found
    finally:
        for engine in found:
            engine.close()


def asleep(found: list[Engine]) -> bool:
    """Whether no wave is under way: all engines have said in the same step that they have none."""
    return (
        all(engine.begun and engine.begun[-1] is None for engine in found)
        and len({len(engine.begun) for engine in found}) == 1
    )


def test_engines_without_requests_serve_one_that_has_some_and_then_all_sleep(monkeypatch):
    monkeypatch.setattr(wave_launcher, "LATE_S", TIMEOUT_S)
    with engines(3) as found:
        assert not any(engine.begun for engine in found), "an idle engine waits without exchanges"
        for name in "abc":
            assert found[1].launch(name, rows=2).result(TIMEOUT_S) == name
        found[1].launcher.rest()
        wait_until(lambda: asleep(found))
        assert [engine.steps for engine in found] == [[], ["a", "b", "c"], []]
        assert found[1].begun == [2, 2, 2, None], "the others wait for it between two steps"
        assert not any(found[0].begun) and not any(found[2].begun)
        begun = len(found[0].begun)
        late = found[2].launcher._queue
        late.put(Wave(0))
        wait_until(late.empty)
        assert len(found[2].begun) == begun, "a message that comes after its wave starts nothing"
        found[0].launch("later").result(TIMEOUT_S)
        found[0].launcher.rest()
        wait_until(lambda: asleep(found) and len(found[0].begun) > begun)
        assert found[0].steps == ["later"]


def test_engines_that_start_at_the_same_time_share_their_steps():
    with engines(2) as found:
        for i in range(20):
            launched = [engine.launch(str(i)) for engine in found]
            for step in launched:
                step.result(TIMEOUT_S)
        for engine in found:
            engine.launcher.rest()
        wait_until(lambda: asleep(found))
        assert [engine.steps for engine in found] == [[str(i) for i in range(20)]] * 2


def test_the_other_ranks_of_an_engine_take_its_steps_in_the_same_order():
    with engines(4, ranks=2) as found:
        found[1].launch("a")
        assert not found[1].begun, "a wave is started by the first rank"
        assert found[0].launch("a", rows=2).result(TIMEOUT_S) == "a"
        found[0].launch("b").result(TIMEOUT_S)
        found[0].launcher.rest()
        assert found[1].launch("b").result(TIMEOUT_S) == "b", "the wave waits for a rank that is late"
        wait_until(lambda: asleep(found[::2]))
        assert [rank.steps for rank in found] == [["a", "b"], ["a", "b"], [], []]
        assert not any(found[2].begun) and not any(found[3].begun)
        later = [found[i].launch("c") for i in (3, 2)]
        assert [step.result(TIMEOUT_S) for step in later] == ["c", "c"]
        found[2].launcher.rest()
        wait_until(lambda: asleep(found[::2]))


def test_a_rank_whose_first_rank_launches_nothing_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(wave_launcher, "COLLECTIVE_TIMEOUT_S", 0.2)
    with engines(2, ranks=2) as found, pytest.raises(EngineUnavailable, match="has not gone on with a step for 0 s"):
        found[1].launch("a").result(TIMEOUT_S)


def test_an_engine_that_is_late_once_is_served_meanwhile(monkeypatch):
    monkeypatch.setattr(wave_launcher, "LATE_S", 0.01)
    with engines(2) as found:
        found[0].launch("a").result(TIMEOUT_S)  # and it neither launches another step nor rests
        assert found[1].launch("b").result(TIMEOUT_S) == "b"
        found[1].launcher.rest()
        wait_until(lambda: asleep(found))


def test_a_step_that_fails_ends_its_engine_and_the_steps_of_all_others():
    with engines(2) as found:
        found[0].fails = True
        with pytest.raises(ValueError, match="a step failed"):
            found[0].launch("a").result(TIMEOUT_S)
        with pytest.raises(EngineUnavailable, match="a step failed"):
            found[0].launch("b")
        with pytest.raises(EngineUnavailable, match="a step failed"):
            found[0].launcher.rest()
        wait_until(lambda: found[1].launcher._broken is not None)
        with pytest.raises(EngineUnavailable, match="a step failed"):
            found[1].launch("c")


def test_an_aborted_group_refuses_steps_with_the_reason():
    with engines(2) as found:
        found[0].group.abort("engine 1 died")
        with pytest.raises(EngineUnavailable, match="engine 1 died"):
            found[0].launch("a").result(TIMEOUT_S)
