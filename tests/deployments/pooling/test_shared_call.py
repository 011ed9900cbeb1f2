from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deployments.pooling.shared_call import SharedCall
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from tests.deployments.fake_api import until


class Pool:
    """Calls end when they are told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], asyncio.Future[None]]] = []

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append(([request.request_id for request in requests], end))
        await end


async def start(shared: SharedCall, *names: str) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(shared.generate(GenerateRequest(request_id=name, prompt=[5]))) for name in names]
    await asyncio.sleep(0)
    return tasks


async def test_all_requests_go_in_one_call_when_the_last_has_come_and_end_with_it():
    pool = Pool()
    shared = SharedCall(pool, 3)
    tasks = await start(shared, "a", "b")
    assert not pool.calls
    tasks += await start(shared, "c")
    await until(lambda: pool.calls)
    ((names, end),) = pool.calls
    assert names == ["a", "b", "c"]
    end.set_result(None)
    await asyncio.gather(*tasks)


async def test_its_error_is_that_of_each_request_and_later_attempts_have_calls_of_their_own():
    pool = Pool()
    shared = SharedCall(pool, 2)
    tasks = await start(shared, "a", "b")
    await until(lambda: pool.calls)
    pool.calls[0][1].set_exception(EngineUnavailable("rank 0 died"))
    for task in tasks:
        with pytest.raises(EngineUnavailable, match="rank 0 died"):
            await task
    again = await start(shared, "a.1", "b.1")
    assert [names for names, _ in pool.calls[1:]] == [["a.1"], ["b.1"]]
    pool.calls[1][1].set_result(None)
    await again[0]
    again[1].cancel()
    await until(pool.calls[2][1].cancelled)


async def test_it_is_cancelled_when_the_last_of_its_requests_is():
    pool = Pool()
    tasks = await start(SharedCall(pool, 2), "a", "b")
    await until(lambda: pool.calls)
    end = pool.calls[0][1]
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert not end.cancelled()
    tasks[1].cancel()
    await until(end.cancelled)


async def test_requests_that_are_cancelled_before_the_last_has_come_leave_no_call_behind():
    pool = Pool()
    tasks = await start(SharedCall(pool, 3), "a", "b")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: len(asyncio.all_tasks()) == 2)  # this one, and the one that limits its time
    assert not pool.calls
