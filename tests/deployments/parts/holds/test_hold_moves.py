"""When a replica stops, other replicas are asked to hold what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import pytest

from deployments.parts.holds import hold_moves
from deployments.parts.holds.hold_moves import move_holds
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.replica_part import OtherReplicas
from engine.errors import EngineUnavailable, Overloaded
from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.messages import EngineStatus
from engine.wire.parts.holds import HeldPrompt, HoldMark, PromptHold
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer
from tests.deployments.fake_api import until
from tests.deployments.replicas.test_departure import replica
from tests.deployments.replicas.test_engine_replica import is_healthy, replica_with_engine
from tests.fake_engine import FakeEngine

MODEL = ModelIdentity("weights", "vocabulary")


def prompt(number: int) -> HeldPrompt:
    return HeldPrompt(
        token_ids=[number] * 32,
        cache_salt="salt",
        adapter=None,
        client="alice",
        name=f"talk {number}",
        response_id=f"resp-{number}",
        ttl_s=300.0,
        left_s=120.0,
    )


def leave(
    held: list[HeldPrompt],
    *,
    others: Sequence[EngineStatus] | Exception,
    fails: Exception | None = None,
    hangs: bool = False,
    peer: Peer | None = None,
    fingerprint: str = "same",
) -> FakeEngine:
    """Move the holds of one engine. Returns the engine that is asked to take them."""

    async def scenario() -> FakeEngine:
        async with AsyncExitStack() as opened:
            leaving, engine = await opened.enter_async_context(replica_with_engine())
            taking, other = await opened.enter_async_context(replica_with_engine())
            engine.held, engine.peer, engine.fingerprint = held, peer, fingerprint
            await until(lambda: is_healthy(leaving) and leaving.status().fingerprint == fingerprint)

            async def statuses() -> Sequence[EngineStatus]:
                if isinstance(others, Exception):
                    raise others
                return others

            async def send(request: GenerateRequest, avoid: Sequence[str]) -> None:
                assert "fake" in avoid and "a" not in avoid and ("computes prompts" in avoid) == (len(others) > 1)
                if fails is not None:
                    raise fails
                if hangs:
                    await asyncio.get_running_loop().create_future()
                await taking.run_request(EncodedRequest.of(request))

            there = OtherReplicas(statuses=statuses, send=send, model=MODEL, host="127.0.0.1", key=None)
            await move_holds(leaving, there)
            return other

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def test_each_hold_is_a_request_for_one_token_with_its_remaining_time(caplog):
    caplog.set_level(logging.INFO)
    peer = Peer("leaving", "tcp://leaving", 1)
    computes_prompts = msgspec.structs.replace(replica("computes prompts"), role="prefill")
    other = leave([prompt(n) for n in range(6)], others=[replica("a"), computes_prompts], peer=peer)
    asked = sorted(other.added, key=lambda request: request.prompt)
    assert [request.prompt for request in asked] == [[n] * 32 for n in range(6)]
    first = asked[0]
    assert first.record(PromptHold) == PromptHold(
        marks=[HoldMark(32, 300.0, 120.0)], name="talk 0", response_id="resp-0"
    )
    assert (first.client, first.cache_salt, first.params.max_tokens) == ("alice", "salt", 1)
    assert (first.record(KVHolder), first.model) == (KVHolder(peer, 32), MODEL)
    assert "holds have moved granted=6 of=6" in caplog.text


def test_an_engine_from_which_nothing_can_be_fetched_is_not_named():
    (asked,) = leave([prompt(1)], others=[replica("a")]).added
    assert asked.record(KVHolder) is None


def test_a_version_with_other_numerics_is_asked_if_no_other_replica_is_left():
    new = replica("a", fingerprint="config=c weights=w numerics=new")
    (asked,) = leave([prompt(1)], others=[new], fingerprint="config=c weights=w numerics=old").added
    assert asked.record(PromptHold) is not None


@pytest.mark.parametrize("others", [[], [replica("fake")], [replica("a", fingerprint="another model")],
                                    RuntimeError("Serve's controller is gone"), EngineUnavailable("gone")])  # fmt: skip
def test_without_another_replica_of_the_model_nothing_is_asked(others):
    assert not leave([prompt(1)], others=others).added


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), Overloaded("full")])
def test_once_a_hold_could_not_move_the_others_are_not_tried(error, caplog):
    caplog.set_level(logging.INFO)
    assert not leave([prompt(n) for n in range(6)], others=[replica("a")], fails=error).added
    assert "a hold could not move" in caplog.text and "granted=0 of=4" in caplog.text


def test_a_replica_that_does_not_answer_is_waited_for_only_so_long(monkeypatch, caplog):
    monkeypatch.setattr(hold_moves, "MOVE_S", 0.05)
    leave([prompt(1)], others=[replica("a")], hangs=True)
    assert "a hold could not move: TimeoutError" in caplog.text
