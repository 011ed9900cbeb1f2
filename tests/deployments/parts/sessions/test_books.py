"""The books of sessions, which several ingresses write, some of which die."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.billing.bill import Bill, Used
from deployments.frontend.observers import RequestSize
from deployments.parts.sessions import record
from deployments.parts.sessions.books import SessionBooks
from deployments.parts.sessions.errors import SessionBudgetSpent
from deployments.parts.sessions.live_turn import LiveTurn
from deployments.parts.sessions.record import Asked, SessionTree, SessionUsage, StoredTurn
from deployments.storage.config import StoreConfig, open_store
from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest

OWNER = "ann"


class World:
    """Ingresses with one store, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = open_store(StoreConfig())

    def ingress(self) -> SessionBooks:
        return SessionBooks(self.store, lambda: self.now)

    async def tree(self, session: str = "s") -> SessionTree:
        return (await self.ingress().find(OWNER, session))[1]

    async def usage(self, session: str = "s") -> SessionUsage:
        tree = await self.tree(session)
        return tree.usage(tree.below(session))


def asked(session: str = "s", parent: str = "", max_tokens: int | None = None) -> Asked:
    return Asked(session=session, parent=parent, max_tokens=max_tokens, max_budget=None)


def turn(attempt: str, session: str = "s", name: str = "a", **more: Any) -> StoredTurn:
    fields = {"began_at": 1000.0, "ends_by": 1060.0, "prompt_tokens": 10, **more}
    return StoredTurn(id=name, session=session, model="m", attempt=attempt, **fields)


async def test_an_answer_that_another_ingress_takes_over_is_one_turn_whoever_writes_it_last():
    world = World()
    one, other = world.ingress(), world.ingress()
    first, second = turn("one", output_tokens=3), turn("other")
    root, tree = await one.begin(OWNER, asked(), first, need=11, resumes=False)
    await other.begin(OWNER, asked(), second, need=11, resumes=True)
    ended = msgspec.structs.replace(second, output_tokens=20, finish_reason="stop")
    assert await other.write(OWNER, root, tree.epoch, lambda tree: tree.put(ended) or None)
    late = msgspec.structs.replace(first, output_tokens=7, finish_reason="abort")
    for _ in range(2):  # it was only silent
        assert await one.write(OWNER, root, tree.epoch, lambda tree: tree.put(late) or None) is None
    assert await world.usage() == SessionUsage(turns=1, prompt_tokens=10, output_tokens=20)


async def test_an_answer_is_taken_over_although_nothing_is_left_of_the_budget():
    world = World()
    await world.ingress().begin(OWNER, asked(max_tokens=11), turn("one", reserved_tokens=1.0), need=11, resumes=False)
    with pytest.raises(SessionBudgetSpent):
        await world.ingress().begin(OWNER, asked(), turn("two", name="b"), need=11, resumes=False)
    await world.ingress().begin(OWNER, asked(), turn("three"), need=11, resumes=True)


async def test_what_a_dead_ingress_had_reserved_is_free_after_the_time_limit_and_what_it_had_used_stays_used():
    world = World()
    dead = turn("dead", output_tokens=5, reserved_tokens=64.0)
    await world.ingress().begin(OWNER, asked(max_tokens=100), dead, need=11, resumes=False)
    assert [budget.left for budget in (await world.tree()).budgets("s", world.now)] == [100 - 10 - 5 - 64]
    with pytest.raises(SessionBudgetSpent, match="has 21 left of its x-session-max-tokens of 100"):
        await world.ingress().begin(OWNER, asked(), turn("b", name="b"), need=22, resumes=False)
    assert (await world.tree()).turns[0].shown(world.now).finish_reason is None
    world.now = 1061.0
    tree = await world.tree()
    assert [budget.left for budget in tree.budgets("s", world.now)] == [100 - 10 - 5]
    assert tree.turns[0].shown(world.now).finish_reason == "lost"


async def test_turns_that_begin_everywhere_at_once_are_all_counted():
    world = World()
    ingresses = [world.ingress() for _ in range(4)]
    names = [f"{i}" for i in range(40)]
    begun = [(asked(f"sub-{i % 5}", "s"), turn(name, f"sub-{i % 5}", name)) for i, name in enumerate(names)]
    await asyncio.gather(*(ingresses[i % 4].begin(OWNER, *each, need=1, resumes=False) for i, each in enumerate(begun)))
    assert {each.id for each in (await world.tree()).turns} == {*names}
    assert (await world.usage()).turns == 40 and (await world.usage("sub-3")).turns == 8


async def test_turns_that_are_too_many_are_in_the_sums_of_their_sessions(monkeypatch):
    monkeypatch.setattr(record, "MAX_TURNS", 5)
    world = World()
    for i in range(20):
        name, of = str(i), "s" if i % 2 else "sub"
        parent = "" if i % 2 else "s"
        ended = turn(name, of, name, output_tokens=1, finish_reason="stop")
        await world.ingress().begin(OWNER, asked(of, parent), ended, need=1, resumes=False)
    tree = await world.tree()
    assert [each.id for each in tree.turns] == [str(i) for i in range(15, 20)]
    assert tree.usage(["s"]) == tree.usage(["sub"]) == SessionUsage(turns=10, prompt_tokens=100, output_tokens=10)


async def test_sessions_that_are_too_many_below_one_are_added_to_it_unless_they_run(monkeypatch):
    monkeypatch.setattr(record, "MAX_BELOW", 3)
    world = World()
    for i in range(6):
        world.now += 1
        runs = None if i == 1 else "stop"
        begun = turn(str(i), f"sub-{i}", str(i), finish_reason=runs)
        await world.ingress().begin(OWNER, asked(f"sub-{i}", "s"), begun, need=1, resumes=False)
    tree = await world.tree()
    assert [*tree.sessions] == ["s", "sub-1", "sub-5"] and (await world.usage()).turns == 6
    running = turn("6", "sub-6", "6")
    await world.ingress().begin(OWNER, asked("sub-6", "s"), running, need=1, resumes=False)
    with pytest.raises(InvalidParameter, match="x-parent-session-id must be a session with fewer than 3"):
        await world.ingress().begin(OWNER, asked("sub-7", "s"), turn("7", "sub-7", "7"), need=1, resumes=False)
    world.now = 1100.0  # the others are lost
    await world.ingress().begin(OWNER, asked("sub-5"), turn("8", "sub-5", "8"), need=1, resumes=False)
    assert (await world.tree("sub-5")).sessions["sub-5"].parent == "s", "its name is still known to be below"


class Client:
    """A turn of one sequence whose tokens come one by one."""

    def __init__(self, books: SessionBooks, number: int):
        self.output, self.ended = 0, False
        request = GenerateRequest(request_id=f"cmpl-{number}-x-0", prompt=[1] * 10, timeout_s=60.0)
        self.turn = LiveTurn(books, OWNER, asked(f"sub-{number}", "top"), request, "m", has_prices=False)
        self.bill = Bill(lambda: Used(True, 10, self.output, 0.0, 0.0), lambda then: then())

    async def begin(self) -> None:
        try:
            await self.turn.enter(RequestSize(10, 1, None), self.bill)
        except SessionBudgetSpent:
            self.ended = True

    async def step(self, num_tokens: int) -> None:
        """num_tokens: that have come since the last step, since a client may be slow."""
        await self.turn.renew(num_tokens)
        self.output += self.turn.take(num_tokens)
        if self.turn.over:
            self.ended = True
            self.turn.turn.finish_reason = "budget"
            self.turn.leave(self.bill)
            await self.turn.written(60.0)


@given(
    budget=st.integers(20, 400),
    num_turns=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=100),
)
def test_turns_in_several_ingresses_never_exceed_their_budget_and_leave_nothing_of_it(budget, num_turns, steps):
    async def scenario() -> None:
        world = World()
        await world.ingress().begin(
            OWNER, asked("top", max_tokens=budget), turn("t", "top", prompt_tokens=0, finish_reason="stop"), need=1,
            resumes=False,
        )  # fmt: skip
        clients = [Client(world.ingress(), number) for number in range(num_turns)]
        for client in clients:
            await client.begin()
        running = [client for client in clients if not client.ended]
        for number, num_tokens in steps:
            client = clients[number % num_turns]
            if not client.ended:
                await client.step(num_tokens)
        for client in running:  # the last one has nobody beside it
            while not client.ended:
                await client.step(1)
        used = sum(10 + client.output for client in running)
        assert used == budget if running else used == 0
        assert (await world.usage("top")).output_tokens == sum(client.output for client in running)

    asyncio.run(scenario())
