"""What the log says of a model without replicas, and of requests that come meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from deployments.frontend import admission
from deployments.frontend.availability import Availability
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from tests.deployments.fake_api import LocalPool, until


class StartingPool:
    """A pool whose replica is down until `up` is set: its statuses fail, and its requests wait."""

    def __init__(self, pool: LocalPool):
        self.up = asyncio.Event()
        self.polls = 0
        self._generate, self._statuses = pool.generate, pool.statuses
        pool.generate, pool.statuses = self.generate, self.statuses  # type: ignore[method-assign]

    async def generate(self, request: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        await self.up.wait()
        await self._generate(request)

    async def statuses(self):
        self.polls += 1
        if not self.up.is_set():
            raise EngineUnavailable("no replica is up and healthy")
        return await self._statuses()


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    monkeypatch.setattr(admission, "POLL_INTERVAL_S", 0.005)
    caplog.set_level(logging.INFO, "deployments")
    return caplog


def lines(log) -> list[str]:
    """What the log says of the model and its requests, without the values."""
    return [m.partition(" model=")[0].partition(" request_id=")[0] for m in log.messages if "chat format" not in m]


def test_a_model_that_goes_and_comes_is_told_of_twice_however_often_it_is_reported(log):
    availability = Availability("m")
    for _ in range(3):
        availability.report_down()
    for _ in range(3):
        availability.report_up()
    availability.report_down()
    assert lines(log) == ["no replica is up yet; requests wait", "a replica is up", "no replica is up; requests wait"]
    assert [record.levelname for record in log.records] == ["INFO", "INFO", "WARNING"], "a start is no problem"


async def test_clients_that_try_while_the_model_is_starting_are_no_ends_of_requests_in_the_log(log, api):
    await api.until_status()
    pool = StartingPool(api.model.pool)
    for _ in range(3):
        polls = pool.polls
        trying = asyncio.create_task(api.post("completions", prompt="a", max_tokens=1))
        await until(lambda polls=polls: pool.polls > polls + 1)
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
    assert (await api.client.get("/health")).status_code == 503
    assert lines(log) == ["no replica is up yet; requests wait"]
    assert api.telemetry.stats.models["fake"].finished["abort"] == 3, "they are counted all the same"
    pool.up.set()
    await until(lambda: len(lines(log)) > 1)  # although nobody waits any more
    assert (await api.post("completions", prompt="a", max_tokens=1)).status_code == 200
    assert lines(log)[1:] == ["a replica is up", "request ended"]


async def test_clients_that_leave_while_a_model_is_down_that_was_up_are(log, api):
    await api.until_status()
    assert (await api.client.get("/health")).status_code == 200
    pool = StartingPool(api.model.pool)
    leaving = asyncio.create_task(api.post("completions", prompt="a", max_tokens=1))
    await until(lambda: pool.polls > 1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert lines(log) == ["no replica is up; requests wait", "request ended"]


async def test_nobody_looks_for_a_model_that_is_asleep_once_nobody_needs_it(log, api):
    await api.until_status()
    pool = StartingPool(api.model.pool)
    leaving = asyncio.create_task(api.post("completions", prompt="a", max_tokens=1))
    await until(lambda: pool.polls > 1)
    api.model.pool.sleeps = True
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    watch = api.model.admission._watch
    assert watch is not None
    async with asyncio.timeout(60):
        await watch
