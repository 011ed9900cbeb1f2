"""When a replica stops, its requests move as far as others have room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from deployments.replicas import departure
from deployments.replicas.departure import GROUP, depart
from deployments.replicas.pools import ReplicaStatus
from engine.errors import EngineUnavailable
from engine.wire.messages import EngineStatus
from tests.deployments.replicas.fake_prefill import status


def replica(name: str, running: int = 0, fingerprint: str = "same") -> ReplicaStatus:
    found = status(name)
    stats = msgspec.structs.replace(found.stats, running=running, waiting=0, receiving=0)
    return ReplicaStatus.of(msgspec.structs.replace(found, fingerprint=fingerprint, stats=stats), {})


class Engine:
    """Requests leave one round after they were told to."""

    def __init__(self, num_answers: int, lives: bool = True, fingerprint: str = "same"):
        self.num_answers, self.lives, self.fingerprint = num_answers, lives, fingerprint
        self.moved: list[int] = []

    def status(self) -> ReplicaStatus:
        if not self.lives:
            raise EngineUnavailable("gone")
        return replica("own", self.num_answers, self.fingerprint)

    def move_requests(self, count: int) -> None:
        self.moved.append(count)
        self.num_answers -= min(count, self.num_answers)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(departure, "ROUND_S", 0.0)


def run(engine: Engine, *rounds: Sequence[EngineStatus] | Exception) -> None:
    answers = iter(rounds)

    async def statuses() -> Sequence[EngineStatus]:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    asyncio.run(depart(engine, statuses, slots=8))  # type: ignore[arg-type]


def test_as_many_move_as_others_have_room_for_until_none_is_left():
    engine = Engine(10)
    free = [replica("a", 0)]
    run(engine, [replica("own", 10), replica("a", 5), replica("b", 8)], [replica("a", 8)], free, free)
    assert engine.moved == [3, GROUP, 3] and not engine.num_answers


def test_many_leave_in_larger_groups():
    engine = Engine(160)
    run(engine, *[[replica(name, 0) for name in "ab"]] * 16)
    assert engine.moved == [10] * 16


def test_the_next_group_leaves_once_the_one_before_has_left(monkeypatch):
    monkeypatch.setattr(departure, "ROUND_S", 60.0)
    engine = Engine(8)
    run(engine, *[[replica("a", 0)]] * 2)
    assert engine.moved == [GROUP, GROUP]


OLD, NEW = "kv=2 config=c weights=w numerics=old", "kv=2 config=c weights=w numerics=new"
OTHER = "kv=2 config=c weights=other numerics=old"


@pytest.mark.parametrize(
    ("own", "others", "moved"),
    [
        (OLD, {"own": OLD}, []),
        (OLD, {"a": OTHER}, []),
        ("", {"a": ""}, []),
        (OLD, {"a": OTHER, "new": NEW}, [3]),
        (NEW, {"old": OLD}, [3]),
    ],
    ids=["none", "other weights", "without handoffs", "the next version", "the version before"],
)
def test_requests_go_where_the_same_model_is_and_else_stay(own, others, moved):
    engine, rounds = Engine(3, fingerprint=own), 0

    async def statuses() -> list[ReplicaStatus]:
        nonlocal rounds
        rounds += 1
        return [replica(name, 0, fingerprint) for name, fingerprint in others.items()]

    asyncio.run(depart(engine, statuses, slots=8, goes_on=lambda: rounds < 3))  # type: ignore[arg-type]
    assert engine.moved == moved


def test_requests_stay_with_their_numerics_while_a_replica_with_these_lives():
    engine = Engine(3, fingerprint=OLD)
    full = [replica("old", 8, OLD), replica("new", 0, NEW)]
    run(engine, full, full, [replica("old", 6, OLD), replica("new", 0, NEW)], [replica("new", 7, NEW)])
    assert engine.moved == [2, 1]


def test_a_round_in_which_others_cannot_be_asked_moves_nothing():
    engine = Engine(3)
    run(engine, RuntimeError("Serve's controller is gone"), [replica("a", 0)])
    assert engine.moved == [3] and not engine.num_answers


def test_an_engine_that_has_ended_moves_nothing():
    engine = Engine(3, lives=False)
    run(engine)
    assert not engine.moved
