"""What a rank group makes of its ranks' errors; real ranks are in tests/serve/test_rank_groups.py."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from engine.black_box import Found
from engine.distributed.data_parallel.roster import Roster
from engine.errors import ConfigError, EngineUnavailable, StartupError
from placement import rank_watch
from placement.rank_group import RankGroup, _verdict
from placement.rank_watch import RankWatch
from placement.spec import GroupSpec

WRONG = ConfigError("tensor_parallel_size", 3, "a divisor of 4")
DEAD = RayActorError()
TIMEOUT_S = 60.0


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
        self.hangs, self._killed = hangs, asyncio.Event()

    def options(self, concurrency_group: str) -> SimpleNamespace:
        return SimpleNamespace(remote=self._answer)

    def kill(self) -> None:
        self._killed.set()

    async def _run(self) -> None:
        await self._killed.wait()
        raise DEAD

    async def _answer(self) -> None:
        if self.hangs:
            await self._killed.wait()
        if self._killed.is_set():
            raise DEAD


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
        reason = asyncio.run(group.run(lambda engine, reason, doing: lost.append(engine)))
    finally:
        group._roster.close()
    assert len(lost) == len(killed) == 2 and not group._roster.members
    assert reason.startswith("rank ")


class Boxes:
    """Black boxes of ranks, as they are found. What `doing` says of each rank is its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.found: dict[int, Found | None] = {}
        monkeypatch.setattr("placement.rank_group.find", lambda path: self.found[int(path.suffix[1:])])
        monkeypatch.setattr("placement.rank_group.trace", lambda path: "")


ALIVE, FATAL, KILLED, STOPPED = (
    Found(life, is_fatal, ["computes one"])
    for life, is_fatal in (("alive", False), ("dead", True), ("dead", False), ("stopped", False))
)


@pytest.mark.parametrize(
    ("boxes", "errors", "hangs", "counts"),
    [
        ([FATAL], [DEAD], False, True),
        ([KILLED], [DEAD], False, False),
        ([ALIVE], [remote(ValueError("boom"))], False, True),
        ([ALIVE], [remote(EngineUnavailable("rank 1 is gone"))], False, False),
        ([ALIVE], [None], True, True),
        ([STOPPED], [None], True, False),
        ([KILLED], [None], True, False),
        ([None], [DEAD], False, False),
        ([ALIVE, FATAL], [remote(EngineUnavailable("rank 1 is gone")), DEAD], False, True),
        ([FATAL, KILLED], [DEAD, DEAD], False, False),  # it aborts because the other was killed
        ([FATAL, KILLED], [DEAD, None], False, False),  # the same, before that is known
        ([ALIVE, ALIVE], [remote(ValueError("connection lost")), DEAD], False, False),  # its process is about to end
        ([FATAL, None], [DEAD, None], False, False),  # nobody knows of the other, on another machine
    ],
)
def test_what_an_engine_did_is_known_only_if_it_ended_by_itself(monkeypatch, boxes, errors, hangs, counts):
    async def scenario() -> list[str]:
        found = Boxes(monkeypatch)
        found.found = dict(enumerate(boxes))
        group = RankGroup(GroupSpec(num_ranks=len(boxes)))
        group._ranks, group._width, group._replica = [FakeRank(error) for error in errors], len(boxes), "decode"
        await group.run()
        await asyncio.sleep(0)  # the others that end at once
        return group.doing(0, hangs)

    doing = asyncio.run(scenario())
    assert doing == (["ended decode.0", *["computes one"] * len(boxes)] if counts else [])


@pytest.fixture
def watched(monkeypatch):
    """Return a function that makes a group of engines with two ranks each, which is asked often."""
    monkeypatch.setattr(rank_watch, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("placement.rank_group.ray.kill", FakeProcess.kill)

    def make(size: int, stall_timeout_s: float = 0.05) -> tuple[RankGroup, list[FakeProcess]]:
        group = RankGroup(GroupSpec(num_ranks=size, stall_timeout_s=stall_timeout_s))
        group._ranks = ranks = [FakeProcess() for _ in range(size)]
        group._width, group._roster = 2, Roster(["tcp://127.0.0.1:1"] * size, None, 2)
        return group, ranks

    return make


@pytest.mark.parametrize(("hanging", "lost"), [([], []), ([3], [1]), ([2, 3, 4], [1, 2]), ([0, 2, 4], [0, 1])], ids=str)
def test_engines_with_ranks_that_hang_are_lost_unless_all_do(watched, hanging, lost):
    async def scenario() -> None:
        found: list[tuple[int, str]] = []
        group, ranks = watched(6)
        running = asyncio.create_task(group.run(lambda engine, reason, doing: found.append((engine, reason))))
        hung = asyncio.create_task(group.until_hung())
        for number in hanging:
            ranks[number].hangs = True
        while [engine for engine, _ in found] != lost or hung.done() != (hanging == [0, 2, 4]):
            await asyncio.sleep(0.01)
        assert all(reason == f"rank {min(n for n in hanging if n // 2 == engine)} hangs" for engine, reason in found)
        assert [rank._killed.is_set() for rank in ranks] == [number // 2 in lost for number in range(6)]
        assert not running.done(), "the killed ranks are not missed"
        assert not hung.done() or hung.result() == "all engines hang"
        running.cancel()
        hung.cancel()
        group._roster.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_rank_that_has_not_answered_for_a_while_is_to_blame_if_an_engine_makes_no_progress(watched):
    async def scenario() -> None:
        lost: list[int] = []
        group, ranks = watched(4, stall_timeout_s=3600.0)
        running = asyncio.create_task(group.run(lambda engine, reason, doing: lost.append(engine)))
        hung = asyncio.create_task(group.until_hung())
        assert not group.end_hung(0.02), "all answer"
        ranks[2].hangs = True
        while not group.end_hung(0.02):
            await asyncio.sleep(0.01)
        assert lost == [1]
        assert not group.end_hung(0.02), "it is lost already"
        running.cancel()
        hung.cancel()
        group._roster.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_rank_that_ends_while_it_is_asked_does_not_hang(watched):
    async def scenario() -> None:
        reasons: list[str] = []
        group, ranks = watched(4)
        running = asyncio.create_task(group.run(lambda engine, reason, doing: reasons.append(reason)))
        hung = asyncio.create_task(group.until_hung())
        ranks[3].kill()
        while not reasons:
            await asyncio.sleep(0.01)
        assert reasons == ["rank 3 died"] and not hung.done()
        running.cancel()
        hung.cancel()
        group._roster.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_pause_of_the_asking_process_counts_as_one_poll(watched):
    async def scenario() -> None:
        group, ranks = watched(2)
        watch = RankWatch()
        ranks[0].hangs = True
        for polls in range(1, 4):
            asked = asyncio.create_task(watch.poll(dict(enumerate(ranks))))
            await asyncio.sleep(0)
            time.sleep(0.05)  # five times the interval of polls
            await asked
            assert watch.silent(polls * 0.01 - 1e-9) == [0]
            assert watch.silent(polls * 0.01 + 1e-9) == []
        watch.close()
        group._roster.close()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


async def test_where_engines_end_together_none_is_asked(monkeypatch):
    monkeypatch.setattr(rank_watch, "POLL_INTERVAL_S", 0.01)
    group = RankGroup(GroupSpec(num_ranks=2, stall_timeout_s=0.01))
    group._ranks = [FakeProcess(hangs=True), FakeProcess()]
    running = asyncio.create_task(group.run())
    hung = asyncio.create_task(group.until_hung())
    assert not (await asyncio.wait([hung], timeout=0.1))[0] and not group.end_hung()
    running.cancel()
    hung.cancel()


def test_ranks_that_are_not_ready_in_time_are_named():
    async def scenario() -> None:
        never = asyncio.Event()
        group = RankGroup(GroupSpec(num_ranks=3, startup_timeout_s=7))
        await group._all([asyncio.sleep(0), never.wait(), never.wait()], time.monotonic() + 0.05)

    with pytest.raises(EngineUnavailable, match="not ready within startup_timeout_s=7: rank 1, 2 of 3"):
        asyncio.run(scenario())
