from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq

from deployments.replicas import engine_control
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from engine.errors import EngineUnavailable, RequestTimeout
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.handoffs import CancelDispatch
from engine.wire.sampling_params import SamplingParams
from tests.deployments.fake_api import until
from tests.fake_engine import FakeEngine
from tests.refused import Refused


def generate_request(request_id: str = "a", **fields: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=3)
    return GenerateRequest(request_id=request_id, prompt=[1], params=params, reply_to="tcp://127.0.0.1:9", **fields)


def request(request_id: str = "a", **fields: Any) -> EncodedRequest:
    return EncodedRequest.of(generate_request(request_id, **fields))


@asynccontextmanager
async def replica_with_engine(**options: float) -> AsyncGenerator[tuple[EngineReplica, FakeEngine]]:
    replica = EngineReplica("127.0.0.1", **options)
    task = asyncio.create_task(replica.run())
    engine = FakeEngine(replica.status_to)
    replica.connect(engine.address)
    try:
        yield replica, engine
    finally:
        engine.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"nonsense", "malformed"),
        (msgspec.msgpack.encode({"type": "EngineStatus"}), "malformed"),
        (msgspec.msgpack.encode(CancelDispatch("h")), "unexpected"),  # there is no prefill pool
    ],
)
async def test_a_notice_that_no_engine_of_ours_would_send_is_counted_and_the_replica_lives_on(junk, reason):
    refused = Refused("engine_notices", reason)
    async with replica_with_engine() as (replica, _):
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(replica.status_to)
            stranger.send(junk)
            await until(lambda: refused.count == 1)
        await replica.run_request(request())
        await until(lambda: is_healthy(replica))
        assert replica.status().refused["engine_notices"][reason] >= 1


async def test_call_is_open_until_its_request_has_ended():
    async with replica_with_engine() as (replica, engine):
        engine.paused.set()
        call = asyncio.create_task(replica.run_request(request()))
        await until(lambda: engine.num_live == 1)
        assert not call.done()
        engine.paused.clear()
        await call
        assert engine.num_live == 0


async def test_the_engine_gets_the_request_as_it_was_encoded():
    async with replica_with_engine() as (replica, engine):
        await replica.run_request(request(timeout_s=9.0, session_id="s", cache_salt="salt"))
        assert engine.added == [generate_request(timeout_s=9.0, session_id="s", cache_salt="salt")]


async def test_cancelled_call_aborts_its_request_only():
    async with replica_with_engine() as (replica, engine):
        engine.paused.set()
        calls = {name: asyncio.create_task(replica.run_request(request(name))) for name in "ab"}
        await until(lambda: engine.num_live == 2)
        calls["a"].cancel()
        await until(lambda: engine.aborted == ["a"])
        engine.paused.clear()
        await calls["b"]


async def test_a_call_of_several_requests_ends_with_the_last_and_aborts_all_when_it_is_cancelled():
    async with replica_with_engine() as (replica, engine):
        await replica.run_requests([request("a"), request("b")])
        assert [added.request_id for added in engine.added] == ["a", "b"]
        engine.paused.set()
        call = asyncio.create_task(replica.run_requests([request("c"), request("d")]))
        await until(lambda: engine.num_live == 2)
        call.cancel()
        await until(lambda: sorted(engine.aborted) == ["c", "d"])
        call = asyncio.create_task(replica.run_requests([request("e"), request("f")]))
        await until(lambda: engine.num_live == 2)
        replica.fail("rank 0 died")
        with pytest.raises(EngineUnavailable, match="rank 0 died"):
            await call


async def test_loss_of_the_engine_ends_open_calls_and_refuses_new_ones():
    async with replica_with_engine() as (replica, engine):
        engine.paused.set()
        call = asyncio.create_task(replica.run_request(request()))
        await until(lambda: engine.num_live == 1)
        replica.fail("rank 0 died")
        for attempt in (call, replica.run_request(request("b"))):
            with pytest.raises(EngineUnavailable, match="rank 0 died"):
                await attempt


async def test_request_that_the_engine_forgets_ends_with_its_deadline(monkeypatch):
    monkeypatch.setattr(engine_control, "TIMEOUT_GRACE_S", 0.05)
    async with replica_with_engine() as (replica, engine):
        engine.paused.set()
        with pytest.raises(RequestTimeout):
            await replica.run_request(request(timeout_s=0.05))
        await until(lambda: engine.aborted == ["a"])


async def test_silent_engine_is_unhealthy():
    async with replica_with_engine(stall_timeout_s=0.2) as (replica, engine):
        await until(lambda: is_healthy(replica))
        engine.silent.set()
        await until(lambda: not is_healthy(replica))
        engine.silent.clear()
        await until(lambda: is_healthy(replica))


async def test_engine_that_makes_no_step_is_unhealthy():
    async with replica_with_engine() as (replica, engine):
        await until(lambda: is_healthy(replica))
        engine.step_age_s = 11.0
        await until(lambda: not is_healthy(replica))
        with pytest.raises(EngineUnavailable, match="no step ended for 11 s"):
            replica.check_health()


async def test_engine_that_stays_unhealthy_is_given_up(monkeypatch):
    monkeypatch.setattr(engine_control, "POLL_INTERVAL_S", 0.01)
    async with replica_with_engine() as (replica, engine):
        given_up = asyncio.create_task(replica.until_unhealthy())
        await until(lambda: is_healthy(replica))
        engine.step_age_s = 11.0
        assert "no step ended for 11 s" in await given_up


def is_healthy(replica: EngineReplica) -> bool:
    try:
        replica.status()
    except EngineUnavailable:
        return False
    return True
