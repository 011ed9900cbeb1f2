"""What the control actor of a replica does with several engines."""

from __future__ import annotations

import asyncio
import pickle

import msgspec
import pytest

from deployments.ray_compat import engine_ids
from deployments.replicas import engine_control
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.replica_engines import ReplicaEngines
from engine.errors import EngineUnavailable
from engine.wire.messages import Answer, EngineStatus, ResetPrefixCache
from engine.wire.parts.holds import GiveHolds
from tests.deployments.replicas.test_engine_replica import request
from tests.engine_stats import engine_stats


class NotedEngine(EngineControl):
    """An engine of which only the commands to it are known."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def send(self, command: bytes) -> None:
        self.sent.append(command)

    def report(self, name: str, step_age_s: float = 0.0) -> None:
        self.handle(EngineStatus(engine_id=name, ended=[], stats=engine_stats(), last_step_age_s=step_age_s))


def made() -> ReplicaEngines[NotedEngine]:
    """Two engines; there has to be a running event loop."""
    return ReplicaEngines({name: NotedEngine() for name in engine_ids("decode-m-x", 2)})


def test_the_engines_of_a_replica_have_its_name_and_their_number_and_one_alone_has_its_name():
    assert engine_ids("decode-m-x", 2) == ["decode-m-x.dp0", "decode-m-x.dp1"]
    assert engine_ids("decode-m-x", 1) == ["decode-m-x"]


def test_a_request_goes_to_the_engine_that_the_router_chose_else_to_the_one_with_fewest():
    async def scenario() -> None:
        engines = made()
        first, second = engines.all
        assert engines.choose("decode-m-x.dp1") is second
        assert engines.choose("decode-m-y.dp1") is first, "one of another replica, which was full"
        call = asyncio.create_task(first.run_request(request()))
        await asyncio.sleep(0)
        assert engines.choose("") is second
        call.cancel()

    asyncio.run(scenario())


def test_a_replica_is_as_healthy_as_its_worst_engine(monkeypatch):
    monkeypatch.setattr(engine_control, "POLL_INTERVAL_S", 0.01)

    async def scenario() -> None:
        engines = made()
        first, second = engines.all
        first.report("decode-m-x.dp0")
        with pytest.raises(EngineUnavailable, match="has just started"):
            engines.statuses()
        second.report("decode-m-x.dp1")
        assert [status.engine_id for status in engines.statuses()] == ["decode-m-x.dp0", "decode-m-x.dp1"]
        engines.check_health()
        second.report("decode-m-x.dp1", step_age_s=99.0)
        with pytest.raises(EngineUnavailable, match="no step ended for 99 s"):
            engines.check_health()
        assert "no step ended for 99 s" in await asyncio.wait_for(engines.until_unhealthy(), 60)

    asyncio.run(scenario())


def test_all_engines_are_asked_and_their_answers_come_in_their_order():
    async def scenario() -> None:
        engines = made()
        asked = asyncio.create_task(engines.ask(GiveHolds(4)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first, second = engines.all
        [question] = [msgspec.msgpack.decode(sent, type=GiveHolds) for sent in second.sent]
        second.handle(Answer.to(question, b"second"))
        assert not asked.done()
        first.handle(Answer.to(question, b"first"))
        assert [msgspec.msgpack.decode(answer) for answer in await asked] == [b"first", b"second"]

    asyncio.run(scenario())


def test_only_engines_of_other_replicas_are_others():
    async def statuses() -> list[EngineStatus]:
        names = ("decode-m-x.dp0", "decode-m-x.dp1", "decode-m-y.dp0")
        return [EngineStatus(engine_id=name, ended=[], stats=engine_stats(), last_step_age_s=0.0) for name in names]

    async def scenario() -> None:
        assert [status.engine_id for status in await made().others(statuses)()] == ["decode-m-y.dp0"]

    asyncio.run(scenario())


def test_the_end_of_one_engine_ends_the_calls_of_all_and_commands_reach_all():
    async def scenario() -> None:
        engines = made()
        engines.tell(ResetPrefixCache())
        engines.set_role("prefill")
        assert all(len(engine.sent) == 2 for engine in engines.all)
        calls = [asyncio.create_task(engine.run_request(request(str(i)))) for i, engine in enumerate(engines.all)]
        await asyncio.sleep(0)
        assert engines.num_answers == 2
        engines.fail("rank 1 died")
        for call in calls:
            with pytest.raises(EngineUnavailable, match="rank 1 died"):
                await call

    asyncio.run(scenario())


def test_what_an_engine_did_when_it_ended_by_itself_is_told_to_its_own_calls_only(monkeypatch):
    async def scenario() -> None:
        engines = made()
        first, second = engines.all
        second.report("decode-m-x.dp1", step_age_s=99.0)
        assert second.hangs and not first.hangs
        calls = [asyncio.create_task(engine.run_request(request(str(i)))) for i, engine in enumerate(engines.all)]
        await asyncio.sleep(0)
        engines.fail("it hangs", lambda number, hangs: [f"{number} {hangs}"])
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(error, "doing", None) for error in found] == [["0 False"], ["1 True"]]
        assert not second.hangs, "it is gone"
        sent = pickle.loads(pickle.dumps(found[0]))
        assert (str(sent), list(sent.doing)) == ("it hangs", ["0 False"])

    asyncio.run(scenario())


def test_what_an_engine_is_asked_ends_with_the_engine():
    async def scenario() -> None:
        engines = made()
        asked = asyncio.create_task(engines.all[0].ask(GiveHolds(4), timeout_s=600.0))
        await asyncio.sleep(0)
        engines.fail("rank 0 died")
        with pytest.raises(EngineUnavailable, match="rank 0 died"):
            await asyncio.wait_for(asked, 60)

    asyncio.run(scenario())
