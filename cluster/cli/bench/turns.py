"""Sends the turns of conversations, each after the answers that it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from cluster.cli.bench.openai_client import RequestResult
from cluster.lab.simulator.conversations.turn import DueTurns, Turn


async def send_turns(
    send: Callable[[bytes, str], Awaitable[RequestResult]],
    bodies: Sequence[bytes],
    times: Sequence[float],
    turns: Sequence[Turn],
    max_concurrency: int | None,
) -> list[RequestResult]:
    """Send each body at its time, in seconds from now, or after the answers that it waits for and a pause; and then as
    soon as `max_concurrency` allows. send: takes a body, and the id of its conversation. A failed turn counts as
    answered."""
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    due, outcomes = DueTurns(turns), dict[int, RequestResult]()
    async with asyncio.TaskGroup() as tasks:

        async def one(index: int, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            async with slots:
                outcomes[index] = await send(bodies[index], session_id(turns[index]))
            for other in due.ended(index):
                tasks.create_task(one(other, turns[other].think_s))

        for index in due.first:
            tasks.create_task(one(index, times[index]))
    return [outcomes[index] for index in range(len(bodies))]


def session_id(turn: Turn) -> str:
    """Return the id of an agent's conversation, by which servers find its cache."""
    return f"session-{turn.session}-agent-{turn.agent}"
