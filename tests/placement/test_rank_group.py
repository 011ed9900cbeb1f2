"""What a rank group makes of its ranks' errors; real ranks are in tests/serve/test_rank_groups.py."""

from __future__ import annotations

import asyncio
import time

import pytest
from ray.exceptions import RayActorError, RayTaskError

from engine.black_box import Found
from engine.errors import ConfigError, EngineUnavailable, StartupError
from placement.rank_group import RankGroup, _verdict, check_versions
from placement.spec import GroupSpec

WRONG = ConfigError("tensor_parallel_size", 3, "a divisor of 4")
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


def test_ranks_that_are_not_ready_in_time_are_named():
    async def scenario() -> None:
        never = asyncio.Event()
        group = RankGroup(GroupSpec(num_ranks=3, startup_timeout_s=7))
        await group._all([asyncio.sleep(0), never.wait(), never.wait()], time.monotonic() + 0.05)

    with pytest.raises(EngineUnavailable, match="not ready within startup_timeout_s=7: rank 1, 2 of 3"):
        asyncio.run(scenario())


def test_a_rank_of_another_version_than_its_replica_is_named():
    check_versions("manta 2", ["manta 2", "manta 2"])
    with pytest.raises(StartupError, match="of one version: rank 1 is manta 1, its replica manta 2"):
        check_versions("manta 2", ["manta 2", "manta 1"])
