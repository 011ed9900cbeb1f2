"""The router as Serve runs it, with replicas that are not there."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from deployments import ray_compat
from deployments.routing.prompt_digest import EMPTY, PromptDigest
from deployments.routing.router import EngineRouter, engine_id_of
from deployments.routing.routing_context import RoutingContext
from deployments.routing.stats import RoutingStats
from engine.distributed.cluster_key import ClusterKey
from engine.wire.messages import Command, EngineUpdate, Subscribe, kinds_of
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer
from engine.wire.stats.engine_stats import EngineLoad
from tests.deployments.fake_api import until
from tests.deployments.routing.pools import BLOCK, prompt

POOL = DeploymentID("decode-m", "manta")


@pytest.fixture(autouse=True)
def key(monkeypatch) -> ClusterKey:
    """The cluster's, which is kept by Ray's GCS where there is one."""
    made = ClusterKey.generate()
    monkeypatch.setattr(ray_compat, "cluster_key", lambda: made)
    return made


@dataclass
class FakeReplica:
    """A stand-in for Serve's RunningReplica. ongoing: what it says when it is asked how many calls it has."""

    name: str
    max_ongoing_requests: int = 10
    ongoing: int = 0
    asked: int = 0
    replica_metadata: dict[str, str] = field(default_factory=dict)
    node_id: str = "node"

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, POOL)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        return self.ongoing


@asynccontextmanager
async def router(*replicas: FakeReplica, policy: str = "prefix_aware", **options: Any) -> AsyncGenerator[EngineRouter]:
    made = EngineRouter(POOL, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(**{"block_size": BLOCK, "pools": {"decode": {"policy": policy}}} | options)
    made.update_replicas(list(replicas))
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        if made._receive_task is not None:
            made._receive_task.cancel()
            await asyncio.gather(made._receive_task, return_exceptions=True)


def pending(call: RoutingContext, internal_id: str = "internal") -> PendingRequest:
    return PendingRequest(args=[b"request", call], kwargs={}, metadata=RequestMetadata("request", internal_id))


async def route(router: EngineRouter, call: RoutingContext) -> str:
    """Name of the replica that Serve would send it to."""
    async with asyncio.timeout(60):
        replica = await router._choose_replica_for_request(pending(call))
    router.on_send_request(replica.replica_id)
    return replica.replica_id.unique_id


def plain(number: int, avoid: Sequence[str] = ()) -> RoutingContext:
    return RoutingContext(prompt(f"r{number}", [number] * 40), RoutingStats(), avoid)


async def test_calls_that_share_the_id_of_their_http_request_each_find_a_replica():
    async with router(FakeReplica("a"), FakeReplica("b")) as r:
        found = await asyncio.gather(*(route(r, plain(number)) for number in range(8)))
        assert sorted(found) == ["a"] * 4 + ["b"] * 4


async def test_options_that_only_a_later_version_has_are_ignored():
    """While versions are replaced, a process of the old one opens handles of deployments of the new one."""
    later = {
        "pools": {"decode": {"policy": "round_robin", "weather_weight": 1.0}},
        "block_size": BLOCK,
        "weather": "fair",
    }
    async with router(FakeReplica("a"), FakeReplica("b"), **later) as r:
        assert sorted([await route(r, plain(number)) for number in range(2)]) == ["a", "b"]


async def test_a_call_is_pending_until_it_is_closed_whatever_serve_knows_of_it():
    async with router(FakeReplica("a")) as r:
        calls = [plain(number) for number in range(3)]
        for call in calls:
            await route(r, call)
        assert r._balancer.placements.engine("decode-m-a").load.sequences == 3
        for call, outcome in zip(calls, ("answered", "lost", "ended"), strict=True):
            call.close(outcome)
        await asyncio.sleep(0)
        assert r._balancer.placements.engine("decode-m-a").load == EngineLoad()
        assert "decode-m-a" in r._balancer._unhealthy


async def test_a_call_that_was_cancelled_before_it_was_placed_leaves_nothing():
    async with router(FakeReplica("a")) as r:
        call = plain(1)
        call.close("ended")
        await route(r, call)
        await asyncio.sleep(0)
        assert r._balancer.placements.engine("decode-m-a").load == EngineLoad()


async def test_a_replica_whose_calls_are_too_many_is_passed_over_and_the_next_one_is_taken():
    replicas = [FakeReplica("a", 1, ongoing=1), FakeReplica("b", 1)]
    async with router(*replicas, policy="round_robin") as r:
        for replica in replicas:
            r.on_new_queue_len_info(replica.replica_id, replica.ongoing)
        assert await route(r, plain(1)) == "b"
        assert r._balancer.placements.engine("decode-m-a").load == EngineLoad()
        assert r._balancer.placements.engine("decode-m-b").load.sequences == 1


async def test_a_full_pool_is_asked_with_pauses():
    replica = FakeReplica("a", 1, ongoing=1)
    async with router(replica) as r:
        waiting = asyncio.create_task(route(r, plain(1)))
        began = asyncio.get_running_loop().time()
        await until(lambda: replica.asked > 2)
        assert not waiting.done()
        assert replica.asked < 10 + 60 * (asyncio.get_running_loop().time() - began)
        replica.ongoing = 0
        assert await waiting == "a"


async def test_a_prefill_request_goes_to_any_replica_but_those_to_avoid():
    async with router(FakeReplica("a1"), FakeReplica("b2"), FakeReplica("c3"), policy="round_robin") as r:
        assert {await route(r, plain(number)) for number in range(6)} == {"a1", "b2", "c3"}
        assert {await route(r, plain(number, ["decode-m-b2"])) for number in range(6)} == {"a1", "c3"}


async def test_a_prefill_request_goes_to_a_replica_to_avoid_where_there_is_no_other():
    async with router(FakeReplica("a1")) as r:
        assert await route(r, plain(1, ["decode-m-a1"])) == "a1"


async def test_the_router_subscribes_with_its_first_call(key):
    """A handle that is only used to ask all replicas how they are needs no update."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as engine:
        key.guard_listener(engine)
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        metadata = {"commands_to": f"tcp://127.0.0.1:{port}"}
        async with router(FakeReplica("a", replica_metadata=metadata)) as r:
            assert r._subscriber is None
            await route(r, plain(1))
            async with asyncio.timeout(60):
                command = msgspec.msgpack.decode(await engine.recv(), type=kinds_of(Command))
            assert isinstance(command, Subscribe) and command.resync


async def test_a_replica_that_serve_takes_away_is_forgotten():
    stays, goes = FakeReplica("a"), FakeReplica("b")
    async with router(stays, goes) as r:
        for number in range(4):
            await route(r, plain(number))
        r.update_replicas([stays])
        assert r._balancer.placements.records.keys() == {"decode-m-a"}
        r.on_replica_actor_died(stays.replica_id)
        assert not r._balancer.placements.records


async def test_what_engines_report_is_also_what_serve_takes_for_their_open_calls():
    """Or Serve would ask a replica that had no call for some seconds, and take the next best one if it is slow."""
    async with router(FakeReplica("a")) as r:
        call = plain(0)
        await route(r, call)  # the first call opens the subscription
        call.close("ended")
        await asyncio.sleep(0)
        load = EngineLoad(sequences=7)
        update = EngineUpdate(
            engine_id="decode-m-a",
            number=1,
            snapshot=True,
            load=load,
            stored=b"",
            removed=b"",
            admitted=[],
            prefilled=[],
        )
        assert r._apply(update)
        assert r.replica_queue_len_cache.get(ReplicaID("a", POOL)) == 7


async def test_a_replica_of_engines_that_share_experts_is_chosen_by_its_engines():
    """Each engine has its own load and cached prefixes; the replica is told which engine was chosen."""
    addresses = " ".join(f"tcp://127.0.0.1:{port}" for port in (9, 10))
    replicas = [FakeReplica(name, replica_metadata={"commands_to": addresses}) for name in ("a", "b")]
    async with router(*replicas) as r:
        calls = [plain(number) for number in range(8)]
        found = [(await route(r, call), call.engine) for call in calls]
        engines = [f"decode-m-{name}.dp{number}" for name in "ab" for number in range(2)]
        assert sorted(engine for _, engine in found) == sorted(engines * 2)
        assert all(engine.startswith(f"decode-m-{name}.") for name, engine in found)
        assert pickle.loads(pickle.dumps(calls[0])).engine == found[0][1]
        assert r._balancer.placements.engine(engines[0]).load.sequences == 2
        calls[0].close("lost")
        await asyncio.sleep(0)
        lost = found[0][1].partition(".")[0]
        assert r._balancer._unhealthy == {f"{lost}.dp0", f"{lost}.dp1"}, "they die together"
        avoiding = RoutingContext(prompt("next", [1] * 40), RoutingStats(), [f"{lost}.dp1"])
        assert f"decode-m-{await route(r, avoiding)}" != lost
        r.update_replicas([replicas[1]])
        assert r._balancer.placements.records.keys() == {"decode-m-b.dp0", "decode-m-b.dp1"}


async def test_serve_takes_the_sum_of_what_the_engines_of_a_replica_report():
    metadata = {"commands_to": "tcp://127.0.0.1:9 tcp://127.0.0.1:10"}
    async with router(FakeReplica("a", replica_metadata=metadata)) as r:
        call = plain(0)
        await route(r, call)
        call.close("ended")
        await asyncio.sleep(0)
        for engine, sequences in (("decode-m-a.dp0", 7), ("decode-m-a.dp1", 4)):
            assert r._apply(
                EngineUpdate(
                    engine_id=engine,
                    number=1,
                    snapshot=True,
                    load=EngineLoad(sequences=sequences),
                    stored=b"",
                    removed=b"",
                    admitted=[],
                    prefilled=[],
                )
            )
        assert r.replica_queue_len_cache.get(ReplicaID("a", POOL)) == 11


def test_only_the_holder_of_its_prefix_and_the_engine_travel_with_a_routed_call():
    long = RoutingContext(PromptDigest("r", 10_000, list(range(10_000))), RoutingStats(), ["decode-m-a"])
    assert len(cloudpickle.dumps(long)) < 200
    arrived = pickle.loads(pickle.dumps(long))
    assert isinstance(arrived, RoutingContext) and (arrived.prompt, arrived.holder) == (EMPTY, None)
    long.holder = KVHolder(Peer("decode-m-b", "tcp://b", 2**63), 9_984)
    assert pickle.loads(pickle.dumps(long)).holder == long.holder


def test_the_name_of_an_engine_is_that_of_its_replica():
    assert engine_id_of(ReplicaID("x1", POOL)) == "decode-m-x1"
