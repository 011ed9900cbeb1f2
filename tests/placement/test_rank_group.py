"""What a rank group makes of its ranks' errors; real ranks are in tests/serve/test_rank_groups.py."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from engine.distributed.roster import Roster
from engine.errors import ConfigError, EngineUnavailable, StartupError
from placement.rank_group import RankGroup, _verdict
from placement.spec import GroupSpec

WRONG = ConfigError("tensor_parallel", 3, "a divisor of 4")
DEAD = RayActorError()


def remote(error: Exception) -> RayTaskError:
    """Return the error as Ray raises it where the call was made."""
    return RayTaskError("start", "Traceback ...", error, proctitle="rank", pid=1, ip="127.0.0.1")


class FakeRank:
    """`run` ends with `error`, or without one."""

    def __init__(self, error: Exception | None):
        self.run, self._error = self, error

    async def remote(self) -> None:
        if self._error is not None:
            raise self._error


class FakeProcess:
    """A rank that runs until it is killed. While it hangs, it answers nothing."""

    def __init__(self, *, hangs: bool = False):
        self.run = SimpleNamespace(remote=self._run)
        self.answer = self
        self._hangs, self._killed = hangs, asyncio.Event()

    def options(self, concurrency_group: str) -> SimpleNamespace:
        return SimpleNamespace(remote=self._answer)

    def kill(self) -> None:
        self._killed.set()

    async def _run(self) -> None:
        await self._killed.wait()
        raise DEAD

    async def _answer(self) -> None:
        if self._hangs:
            await self._killed.wait()


def test_error_of_the_rank_that_failed_is_preferred_to_what_others_tell_of_it():
    relayed = remote(StartupError(f"rank 1: {WRONG}"))
    assert _verdict([relayed, remote(WRONG), relayed]) is WRONG
    assert str(_verdict([relayed, None])) == f"rank 1: {WRONG}"


def test_death_of_a_rank_is_preferred_to_the_errors_that_follow_from_it():
    lost = remote(StartupError("rank 0 cannot be reached: connection reset"))
    verdict = _verdict([DEAD, lost, remote(StartupError("rank 2 could not connect to the other ranks"))])
    assert isinstance(verdict, EngineUnavailable)
    assert str(verdict).startswith("rank 0 died while it started")


def test_error_that_is_none_of_ours_is_told_with_its_rank():
    verdict = _verdict([remote(StartupError("rank 1: boom")), remote(ValueError("boom"))])
    assert isinstance(verdict, EngineUnavailable)
    assert str(verdict).startswith("rank 1 failed while it started")


def why(*errors: Exception | None) -> str:
    """The end of ranks that end like this."""
    group = RankGroup(GroupSpec(num_ranks=len(errors)))
    group._ranks = [FakeRank(error) for error in errors]
    return asyncio.run(group.run())


def test_reason_of_the_end_is_short():
    assert why(DEAD) == "rank 0 died"
    assert why(remote(EngineUnavailable("rank 1 is gone"))) == "rank 1 is gone"
    assert why(remote(ValueError("boom"))) == "rank 0 failed: boom"


def test_rank_that_ended_in_order_is_not_the_reason():
    assert why(None, remote(EngineUnavailable("rank 2 is gone")), None) == "rank 2 is gone"
    assert why(None, None) == "its ranks ended"


def test_if_engines_go_on_without_lost_ones_the_end_is_that_of_the_last(monkeypatch):
    killed: list[object] = []
    monkeypatch.setattr("placement.rank_group.ray.kill", killed.append)
    group = RankGroup(GroupSpec(num_ranks=3))
    group._ranks = [FakeRank(error) for error in (DEAD, remote(ValueError("boom")), DEAD)]
    group._roster = Roster(["tcp://127.0.0.1:1"] * 3, None)
    lost: list[int] = []
    try:
        reason = asyncio.run(group.run(lambda engine, reason: lost.append(engine)))
    finally:
        group._roster.close()
    assert len(lost) == len(killed) == 2 and not group._roster.members
    assert reason.startswith("rank ")


@pytest.mark.parametrize(("hanging", "lost"), [([], []), ([3], [1]), ([2, 3, 4], [1, 2]), ([0, 2, 4], [0, 1])], ids=str)
def test_engines_with_ranks_that_hang_are_lost_unless_all_do(monkeypatch, hanging, lost):
    monkeypatch.setattr("placement.rank_group.ANSWER_S", 0.05)
    monkeypatch.setattr("placement.rank_group.ray.kill", FakeProcess.kill)

    async def scenario() -> None:
        found: list[tuple[int, str]] = []
        group = RankGroup(GroupSpec(num_ranks=6))
        group._ranks = ranks = [FakeProcess(hangs=number in hanging) for number in range(6)]
        group._width, group._roster = 2, Roster(["tcp://127.0.0.1:1"] * 6, None, 2)
        running = asyncio.create_task(group.run(lambda engine, reason: found.append((engine, reason))))
        await asyncio.sleep(0)
        assert await group.end_hung() == (hanging not in ([], [0, 2, 4]))
        assert [engine for engine, _ in found] == lost
        assert all(reason == f"rank {min(n for n in hanging if n // 2 == engine)} hangs" for engine, reason in found)
        assert [rank._killed.is_set() for rank in ranks] == [number // 2 in lost for number in range(6)]
        await asyncio.sleep(0)
        assert not running.done(), "the killed ranks are not missed"
        running.cancel()
        group._roster.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs", [True, False])
def test_an_engine_that_ends_while_its_ranks_are_asked_is_lost_once_and_the_others_go_on(monkeypatch, hangs):
    monkeypatch.setattr("placement.rank_group.ray.kill", lambda rank: None)

    async def scenario() -> None:
        lost: list[int] = []
        group = RankGroup(GroupSpec(num_ranks=4))
        group._ranks = ranks = [FakeProcess() for _ in range(4)]
        group._width, group._roster = 2, Roster(["tcp://127.0.0.1:1"] * 4, None, 2)
        running = asyncio.create_task(group.run(lambda engine, reason: lost.append(engine)))
        await asyncio.sleep(0)

        async def asked(rank: FakeProcess) -> bool:
            if rank is ranks[2]:
                ranks[3].kill()
                while not lost:
                    await asyncio.sleep(0)
            return hangs and rank is ranks[2]

        monkeypatch.setattr("placement.rank_group._hangs", asked)
        assert await group.end_hung(), "the other engine goes on"
        assert lost == [1]
        assert not running.done()
        running.cancel()
        group._roster.close()

    asyncio.run(scenario())


def test_where_engines_end_together_none_is_asked():
    assert not asyncio.run(RankGroup(GroupSpec(num_ranks=2)).end_hung())


def test_ranks_that_are_not_ready_in_time_are_named():
    async def scenario() -> None:
        never = asyncio.Event()
        group = RankGroup(GroupSpec(num_ranks=3, startup_timeout_s=7))
        await group._all([asyncio.sleep(0), never.wait(), never.wait()], time.monotonic() + 0.05)

    with pytest.raises(EngineUnavailable, match="not ready within startup_timeout_s=7: rank 1, 2 of 3"):
        asyncio.run(scenario())
