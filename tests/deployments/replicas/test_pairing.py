"""What a decode replica makes sure of before it takes requests, without Ray."""

from __future__ import annotations

import asyncio

import pytest

from deployments.replicas.pairing import pair
from engine.errors import StartupError
from tests.deployments.fake_api import until
from tests.deployments.replicas.fake_prefill import FakeRemotePool, status
from tests.deployments.replicas.test_remote_dispatcher import decode_with


@pytest.mark.parametrize("state", ["deploying", "up"])  # it may be up before its replicas can be reached
async def test_decode_waits_for_the_first_prefill_engine(state):
    pool = FakeRemotePool(state=state)
    async with decode_with(pool) as (replica, engine):
        pairing = asyncio.create_task(pair(replica, pool, 30))
        await until(lambda: engine.told)  # that there is nobody
        assert not pairing.done()
        pool.found = [status("p1")]
        await pairing


async def test_pool_that_is_down_does_not_keep_decode_down():
    pool = FakeRemotePool(state="down")
    async with decode_with(pool) as (replica, _):
        await pair(replica, pool, 30)


async def test_prefill_engine_of_another_model_is_an_error_that_names_both():
    pool = FakeRemotePool(status("p1", fingerprint="kv=1 dtype=bfloat16 layers=2"))
    async with decode_with(pool) as (replica, engine):
        engine.fingerprint = "kv=1 dtype=float32 layers=2"
        message = "p1 cannot compute prompts for fake: it has dtype=bfloat16, where dtype=float32 is needed"
        with pytest.raises(StartupError, match=message):
            await pair(replica, pool, 30)


async def test_during_an_update_decode_waits_for_a_prefill_engine_of_its_own_version():
    pool = FakeRemotePool(status("old", fingerprint="g"), state="deploying")
    async with decode_with(pool) as (replica, engine):
        pairing = asyncio.create_task(pair(replica, pool, 30))
        await until(lambda: engine.told)
        assert not pairing.done()
        pool.found.append(status("new"))
        await pairing


async def test_pool_that_does_not_come_in_time_is_an_error():
    pool = FakeRemotePool(state="deploying")
    async with decode_with(pool) as (replica, _):
        with pytest.raises(StartupError, match="startup_timeout_s=0"):
            await pair(replica, pool, 0.05)
