"""Prefill requests of a decode engine, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from deployments.replicas import remote_dispatcher
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from engine.black_box import compute_key, ended_key
from engine.errors import EngineUnavailable, Overloaded, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.handoffs import (
    CancelDispatch,
    DispatchRemote,
    PrefillReplica,
    PrefillReplicas,
    RemoteRequestFailed,
)
from engine.wire.stats.handoff_stats import PeerPool
from tests.deployments.fake_api import until
from tests.deployments.replicas.fake_prefill import FakeRemotePool, make_remote_request, status
from tests.fake_engine import FakeEngine
from tests.refused import Refused


@asynccontextmanager
async def decode_with(
    pool: FakeRemotePool, encode: FakeRemotePool | None = None
) -> AsyncGenerator[tuple[EngineReplica, FakeEngine]]:
    peers: dict[PeerPool, FakeRemotePool] = {"prefill": pool} | ({"encode": encode} if encode else {})
    replica = EngineReplica("127.0.0.1", peers=peers)
    engine = FakeEngine(replica.status_to)
    engine.fingerprint, engine.encode_fingerprint = "f", "g"
    replica.connect(engine.address)
    task = asyncio.create_task(replica.run())
    try:
        yield replica, engine
    finally:
        engine.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def failures(engine: FakeEngine) -> list[RemoteRequestFailed]:
    return [told for told in engine.told if isinstance(told, RemoteRequestFailed)]


def pools(engine: FakeEngine) -> list[PrefillReplicas]:
    return [told for told in engine.told if isinstance(told, PrefillReplicas)]


async def test_prefill_request_is_one_call_until_its_handoff_is_over():
    pool = FakeRemotePool(status("p1"))
    async with decode_with(pool) as (_, engine):
        engine.notify(DispatchRemote(make_remote_request("h1")))
        engine.notify(DispatchRemote(make_remote_request("h2")))
        await until(lambda: set(pool.open) == {"h1", "h2"})
        pool.end("h1")
        await until(lambda: set(pool.open) == {"h2"})
        engine.notify(CancelDispatch("h2"))
        engine.notify(CancelDispatch("h1"))  # which is over already
        await until(lambda: pool.cancelled == ["h2"])
        assert not failures(engine)


@pytest.mark.parametrize(
    ("error", "retry"), [(EngineUnavailable("the replica died"), True), (Overloaded("all replicas are busy"), False)]
)
async def test_engine_hears_of_a_call_that_failed_and_whether_another_may_do_better(error: ServingError, retry: bool):
    pool = FakeRemotePool(status("p1"))
    async with decode_with(pool) as (_, engine):
        engine.notify(DispatchRemote(make_remote_request()))
        await until(lambda: pool.open)
        pool.fail("h1", error)
        await until(lambda: failures(engine))
        assert failures(engine) == [RemoteRequestFailed("h1", str(error), retry)]


async def test_a_request_with_which_a_prefill_engine_has_ended_is_told_to_its_ingress_and_to_no_other_engine():
    pool = FakeRemotePool(status("p1"))
    async with decode_with(pool) as (replica, engine):
        engine.paused.set()
        sent = GenerateRequest(request_id="r", prompt=[1], reply_to="tcp://127.0.0.1:9")
        call = asyncio.create_task(replica.run_request(EncodedRequest.of(sent)))
        engine.notify(DispatchRemote(make_remote_request()))
        engine.notify(DispatchRemote(make_remote_request("h2")))
        await until(lambda: set(pool.open) == {"h1", "h2"})
        doing = [ended_key("p1"), compute_key("h1")]
        pool.fail("h1", EngineUnavailable("rank 0 died", doing))
        pool.fail("h2", EngineUnavailable("rank 0 died", doing))
        with pytest.raises(EngineUnavailable) as caught:
            await call
        assert list(caught.value.doing) == [*doing, compute_key("r")]
        await until(lambda: failures(engine))
        assert [failure.handoff_id for failure in failures(engine)] == ["h2"], "it only waited there"


async def test_engine_is_told_of_all_prefill_engines_that_fit_it(monkeypatch):
    monkeypatch.setattr(remote_dispatcher, "POLL_INTERVAL_S", 0.01)
    pool = FakeRemotePool(status("p1", queued_tokens=70), status("p2", fingerprint="another model"))
    async with decode_with(pool) as (_, engine):
        await until(lambda: pools(engine) and pools(engine)[-1].replicas)  # it knows its fingerprint by now
        (replica,) = pools(engine)[-1].replicas
        assert (replica.engine_id, replica.queued_tokens) == ("p1", 70)
        pool.found = []
        await until(lambda: pools(engine)[-1].replicas == [])


async def test_prefill_request_asks_to_avoid_engines_that_do_not_fit_or_whose_link_has_failed(monkeypatch):
    monkeypatch.setattr(remote_dispatcher, "POLL_INTERVAL_S", 0.01)
    pool = FakeRemotePool(status("p1"), status("p2"), status("p3", fingerprint="another model"))
    async with decode_with(pool) as (_, engine):
        engine.quarantined = ["p1"]
        looks = iter(range(1, 100))

        def avoided() -> bool:
            name = f"h{next(looks)}"
            engine.notify(DispatchRemote(make_remote_request(name)))
            return ["p3", "p1"] in pool.avoided.values()

        await until(avoided)


async def test_images_go_to_the_encode_engines_that_fit(monkeypatch):
    monkeypatch.setattr(remote_dispatcher, "POLL_INTERVAL_S", 0.01)
    pool, encode = (
        FakeRemotePool(status("p1")),
        FakeRemotePool(status("e1", "g"), status("e2", "g"), status("e3")),
    )
    async with decode_with(pool, encode) as (replica, engine):
        engine.quarantined, engine.quarantined_encode = ["p1"], ["e2"]
        fitting = PrefillReplicas([PrefillReplica.of(found) for found in encode.found[:2]], "encode")
        await until(lambda: fitting in engine.told)
        await until(lambda: replica.status().image_handoffs.quarantined)
        looks = iter(range(1, 100))

        def avoided() -> bool:
            engine.notify(DispatchRemote(make_remote_request(f"h{next(looks)}"), "encode"))
            return ["e3", "e2"] in encode.avoided.values()

        await until(avoided)
        assert not pool.avoided
        engine.notify(CancelDispatch("h1"))
        await until(lambda: encode.cancelled == ["h1"])
        assert set(replica.status().routing) == {"prefill", "encode"}


async def test_an_image_is_refused_where_there_is_no_encode_pool():
    pool = FakeRemotePool(status("p1"))
    refused = Refused("engine_notices", "unexpected")
    async with decode_with(pool) as (_, engine):
        engine.notify(DispatchRemote(make_remote_request(), "encode"))
        await until(lambda: refused.count == 1)
        assert not pool.avoided


async def test_loss_of_the_decode_engine_ends_its_calls_at_prefill():
    pool = FakeRemotePool(status("p1"))
    async with decode_with(pool) as (replica, engine):
        engine.notify(DispatchRemote(make_remote_request()))
        await until(lambda: pool.open)
        replica.fail("rank 0 died")
        await until(lambda: pool.cancelled == ["h1"])


async def test_call_at_prefill_is_open_until_the_engine_says_that_the_handoff_is_over():
    async with decode_with(FakeRemotePool()) as (replica, engine):
        engine.paused.set()
        calls = {
            name: asyncio.create_task(replica.run_request(EncodedRequest.of(make_remote_request(name))))
            for name in ("h1", "h2")
        }
        await until(lambda: len(engine.remote_requests) == 2)
        calls["h1"].cancel()
        await until(lambda: engine.cancelled == ["h1"])
        assert not calls["h2"].done()
        engine.paused.clear()
        await calls["h2"]
