"""The lease of a job: who may have it, and who must notice that it is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from deployments.jobs.event_ids import NoEventIds
from deployments.jobs.job import Job
from deployments.jobs.lease import LEASE_S, Lease, lease_key
from deployments.jobs.record import JobRecord, record_key
from deployments.storage import redis as redis_module
from deployments.storage.key_value import StoreUnavailable
from deployments.storage.memory import MemoryStore
from deployments.storage.redis import MAX_SETTLES, SETTLE_S, RedisStore
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta
from tests.days.loop import VirtualLoop
from tests.deployments.jobs.test_event_ids import FRONTEND

BEGUN = JobRecord("", "/", b"", [], 0, "0" * 32)
COMPLETE = structs.replace(BEGUN, outputs=[TokenDelta(request_id="r", token_ids=[5], finish_reason="length")])


@pytest.mark.parametrize(
    ("stored", "is_due"), [(None, True), (BEGUN.encode(), True), (b"damaged", True), (COMPLETE.encode(), False)]
)
async def test_whoever_has_lost_the_lease_takes_a_job_again_only_if_it_is_not_done(stored, is_due):
    """Seed 1280 of tests.days: an ingress that had stood still computed an answer again that was complete."""
    store = MemoryStore(2**20)
    if stored is not None:
        await store.set(record_key("id"), stored, 60)
    lease = Lease(store, "id", lambda: BEGUN.restore(store, "id", 60))
    assert await lease.renew() is is_due
    assert (await store.get(lease_key("id")) is not None) is is_due
    if stored != b"damaged":
        left = await JobRecord.load(store, "id")
        assert left is not None and (left.outputs is None) is is_due


class Slow(MemoryStore):
    """Answers after a while, in which the lease may end and another holder get it."""

    def __init__(self, pause_s: float):
        super().__init__(2**20)
        self._pause_s = pause_s

    async def add(self, key: str, value: bytes, ttl_s: float) -> bool:
        await self.set(key, b"another", ttl_s)
        await asyncio.sleep(self._pause_s)
        return True


@pytest.mark.parametrize(("pause_s", "taken"), [(LEASE_S - 1.0, True), (LEASE_S + 1.0, False)])
def test_an_ingress_that_stood_still_while_it_took_a_lease_asks_whether_it_still_has_it(pause_s, taken):
    loop = VirtualLoop()
    taking = asyncio.ensure_future(Lease(Slow(pause_s), "job").take(""), loop=loop)
    loop.run_until(taking)
    assert taking.result() is taken
    loop.close()


@pytest.mark.parametrize(("server", "taken"), [("one", True), ("another", False)])
async def test_a_lease_in_a_store_that_restarted_after_it_was_asked_is_given_back(server, taken):
    """Seed 301634 of tests.days: the answer of a server that has just ended said that it had settled."""

    class Restarted(MemoryStore):
        async def settled(self) -> str:
            return server

    store = Restarted(2**20)
    assert await Lease(store, "job").take("one") is taken
    assert (await store.get(lease_key("job")) is not None) is taken


class Restarting:
    """A Redis that has restarted whenever it is asked, so many times."""

    def __init__(self, times: int):
        self.times, self.asked = times, 0

    async def info(self, section: str) -> dict[str, Any]:
        self.asked += 1
        return {"run_id": str(min(self.asked, self.times)), "uptime_in_seconds": 0}


@pytest.mark.parametrize("times", [1, 2, MAX_SETTLES - 1, MAX_SETTLES + 1])
def test_a_redis_that_restarts_while_it_is_waited_for_is_waited_for_again_but_not_for_ever(times, monkeypatch):
    """Seed 82110 of tests.days: two ingresses computed an answer at a time, since the Redis was away twice within three
    seconds."""
    loop, redis = VirtualLoop(), Restarting(times)
    monkeypatch.setattr(redis_module.Redis, "from_url", lambda *_, **__: redis)
    settled = asyncio.ensure_future(RedisStore("redis://nowhere").settled(), loop=loop)
    if times > MAX_SETTLES:
        with pytest.raises(StoreUnavailable, match="has restarted"):
            loop.run_until(settled)
    else:
        loop.run_until(settled)
        assert redis.asked == times + 1
    assert loop.time() == pytest.approx(min(times, MAX_SETTLES) * SETTLE_S)
    loop.close()


async def test_a_new_job_is_found_by_others_only_once_its_ingress_has_the_lease():
    """Seed 403040 of tests.days: the lease came so late that another ingress had found the job and completed it. Its
    answer was computed again, and deleted when that failed."""
    order = []

    class Watched(MemoryStore):
        async def add(self, key: str, value: bytes, ttl_s: float) -> bool:
            order.append(key)
            return await super().add(key, value, ttl_s)

    job = Job("id", structs.replace(BEGUN), Watched(2**20), 60, lambda job: None, stored=False)
    request = GenerateRequest(request_id="r", prompt=[3], params=SamplingParams())
    await job.read(FRONTEND, [[request]], "", None, NoEventIds())
    await job.close()
    assert order[:2] == [lease_key("id"), record_key("id")]
