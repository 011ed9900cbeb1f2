"""Roles as an engine's replica follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from deployments.replicas import role_follower
from deployments.replicas.departure import depart
from deployments.replicas.role_follower import RoleFollower
from engine.wire.messages import EngineStatus
from engine.wire.stats.handoff_stats import Role
from tests.deployments.fake_api import until
from tests.deployments.replicas.test_departure import Engine, replica


class SwitchedEngine(Engine):
    """roles: those that it was given, oldest first."""

    def __init__(self, num_answers: int = 0):
        super().__init__(num_answers)
        self.roles: list[Role] = []

    def set_role(self, role: Role) -> None:
        self.roles.append(role)


class Table:
    """What the policy has written; `fails`: no table can be read."""

    def __init__(self) -> None:
        self.role: Role | None = "decode"
        self.reads, self.fails = 0, False

    async def read(self) -> Role | None:
        self.reads += 1
        if self.fails:
            raise RuntimeError("the head node restarts")
        return self.role


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(role_follower, "POLL_INTERVAL_S", 0.0)


def follow(engine: SwitchedEngine, table: Table, scenario, statuses=None) -> None:
    async def run() -> None:
        leave = None if statuses is None else partial(depart, engine, statuses, 8)
        follower = RoleFollower(engine, table.read, leave)  # type: ignore[arg-type]
        task = asyncio.create_task(follower.run())
        try:
            await scenario()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_an_engine_is_told_each_change_once():
    engine, table = SwitchedEngine(), Table()

    async def scenario() -> None:
        for role in ("prefill", "decode", "prefill"):
            table.role = role
            await until(lambda: engine.roles[-1:] == [table.role])
            seen = table.reads
            await until(lambda: table.reads > seen + 3)  # noqa: B023 - it is awaited here

    follow(engine, table, scenario)
    assert engine.roles == ["prefill", "decode", "prefill"]


def test_a_role_that_cannot_be_read_stays():
    engine, table = SwitchedEngine(), Table()

    async def scenario() -> None:
        table.role = "prefill"
        await until(lambda: engine.roles == ["prefill"])
        table.fails, seen = True, table.reads
        await until(lambda: table.reads > seen + 3)
        table.fails, table.role = False, None  # the table is lost, or does not name this replica
        seen = table.reads
        await until(lambda: table.reads > seen + 3)

    follow(engine, table, scenario)
    assert engine.roles == ["prefill"]


def test_running_requests_of_an_engine_that_stops_answering_move_until_it_answers_again():
    engine, table, rooms = SwitchedEngine(num_answers=9), Table(), [3]
    asked = 0

    async def statuses() -> Sequence[EngineStatus]:
        nonlocal asked
        asked += 1
        return [replica("a", 8 - (rooms.pop() if rooms else 0))]

    async def scenario() -> None:
        table.role = "prefill"
        await until(lambda: engine.num_answers == 6 and asked > 3)
        table.role = "decode"
        await until(lambda: engine.roles == ["prefill", "decode"])
        seen = table.reads
        await until(lambda: table.reads > seen + 3)
        rooms.append(3)
        await until(lambda: table.reads > seen + 9)

    follow(engine, table, scenario, statuses)
    assert engine.moved == [3]
