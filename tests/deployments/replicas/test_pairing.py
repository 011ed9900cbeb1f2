"""What a decode replica makes sure of before it takes requests, without Ray."""

from __future__ import annotations

import asyncio

import pytest

from deployments.replicas.pairing import difference, pair
from engine.errors import EngineUnavailable, StartupError
from engine.wire.messages import ErrorInfo, TokenLogprob
from tests.deployments.fake_api import until
from tests.deployments.replicas.fake_prefill import FakePrefillPool, status
from tests.deployments.replicas.test_engine_replica import run
from tests.deployments.replicas.test_prefill_dispatcher import decode_with


@pytest.mark.parametrize("state", ["deploying", "up"])  # it may be up before its replicas can be reached
def test_decode_waits_for_the_first_prefill_engine_and_tries_it(state):
    async def scenario() -> None:
        pool = FakePrefillPool(state=state)
        async with decode_with(pool) as (replica, engine):
            pairing = asyncio.create_task(pair(replica, pool, "127.0.0.1", 30, 2048))
            await until(lambda: engine.told)  # that there is nobody
            assert not engine.added
            pool.found = [status("p1")]
            await pairing
            assert [request.prefill for request in engine.added] == ["remote", "local"]
            assert len({request.cache_salt for request in engine.added}) == 2

    run(scenario())


def test_test_prompt_fits_the_model_and_covers_a_part_of_a_block():
    async def scenario(max_model_len: int, length: int) -> None:
        pool = FakePrefillPool(status("p1"))
        async with decode_with(pool) as (replica, engine):
            await pair(replica, pool, "127.0.0.1", 30, max_model_len)
            assert [len(request.prompt) for request in engine.added] == [length, length]

    run(scenario(2048, 40))
    run(scenario(32, 28))


def test_pool_that_is_down_does_not_keep_decode_down():
    async def scenario() -> None:
        pool = FakePrefillPool(state="down")
        async with decode_with(pool) as (replica, engine):
            await pair(replica, pool, "127.0.0.1", 30, 2048)
            assert not engine.added

    run(scenario())


def test_prefill_engine_of_another_model_is_an_error_that_names_both():
    async def scenario() -> None:
        pool = FakePrefillPool(status("p1", fingerprint="kv=1 dtype=bfloat16 layers=2"))
        async with decode_with(pool) as (replica, engine):
            engine.fingerprint = "kv=1 dtype=float32 layers=2"
            message = "p1 cannot compute prompts for fake: it has dtype=bfloat16, where dtype=float32 is needed"
            with pytest.raises(StartupError, match=message):
                await pair(replica, pool, "127.0.0.1", 30, 2048)

    run(scenario())


def test_during_an_update_decode_waits_for_a_prefill_engine_of_its_own_version():
    async def scenario() -> None:
        pool = FakePrefillPool(status("old", fingerprint="g"), state="deploying")
        async with decode_with(pool) as (replica, engine):
            pairing = asyncio.create_task(pair(replica, pool, "127.0.0.1", 30, 2048))
            await until(lambda: engine.told)
            assert not pairing.done()
            pool.found.append(status("new"))
            await pairing

    run(scenario())


def test_pool_that_does_not_come_in_time_is_an_error():
    async def scenario() -> None:
        pool = FakePrefillPool(state="deploying")
        async with decode_with(pool) as (replica, _):
            with pytest.raises(StartupError, match="startup_timeout_s=0"):
                await pair(replica, pool, "127.0.0.1", 0.05, 2048)

    run(scenario())


def test_test_prompt_that_does_not_get_across_is_an_error_that_names_both():
    async def scenario() -> None:
        pool = FakePrefillPool(status("p1"))
        async with decode_with(pool) as (replica, engine):
            engine.refusal = ErrorInfo.of(EngineUnavailable("rank 0 could not read"))
            with pytest.raises(StartupError, match="did not get from p1 to fake: rank 0 could not read"):
                await pair(replica, pool, "127.0.0.1", 30, 2048)

    run(scenario())


def test_test_prompt_that_goes_on_otherwise_than_here_is_an_error():
    async def scenario() -> None:
        pool = FakePrefillPool(status("p1"))
        async with decode_with(pool) as (replica, engine):
            engine.logprobs["remote"] = -4.0
            with pytest.raises(StartupError, match=r"computed by p1 for fake is wrong: token 0 has logprob -4\.00"):
                await pair(replica, pool, "127.0.0.1", 30, 2048)

    run(scenario())


def logprobs(*pairs: tuple[int, float]) -> list[TokenLogprob]:
    return [TokenLogprob(token, logprob, 1, []) for token, logprob in pairs]


@pytest.mark.parametrize(
    ("remote", "local", "wrong"),
    [
        (logprobs((5, -0.1), (6, -0.2)), logprobs((5, -0.1), (6, -0.25)), None),
        (logprobs((5, -0.1), (6, -2.2)), logprobs((5, -0.1), (6, -0.2)), "token 1"),
        (logprobs((5, -0.9), (6, -7.0)), logprobs((4, -0.91), (9, -0.1)), None),  # a tie, then two different texts
        (logprobs((5, -3.0), (6, -0.1)), logprobs((4, -0.1), (6, -0.1)), "token 0"),
    ],
)
def test_answers_are_compared_as_far_as_they_are_of_the_same_text(remote, local, wrong):
    assert (difference(remote, local) or "")[:7] == (wrong or "")
