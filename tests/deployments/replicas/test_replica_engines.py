"""What the control actor of a replica does with several engines."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import msgspec
import pytest

from deployments.ray_compat import engine_ids
from deployments.replicas import engine_control, replica_engines
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.replica_engines import ReplicaEngines
from engine.errors import EngineLost, EngineUnavailable
from engine.wire.messages import Answer, EngineStatus, ResetPrefixCache
from engine.wire.part_record import encoded
from engine.wire.parts.experts import SharedSteps
from engine.wire.parts.kv_fetching import ListHotPrefixes
from tests.deployments.replicas.test_engine_replica import request
from tests.engine_stats import engine_stats


class NotedEngine(EngineControl):
    """An engine of which only the commands to it are known."""

    clock = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def send(self, command: bytes) -> None:
        self.sent.append(command)

    def _now(self) -> float:
        return self.clock

    def report(self, name: str, step_age_s: float = 0.0, generation: int = 0) -> None:
        shared = SharedSteps(steps={}, wait_s=0.0, generation=generation)
        stats = msgspec.structs.replace(engine_stats(), parts=encoded(shared))
        self.handle(EngineStatus(engine_id=name, ended=[], stats=stats, last_step_age_s=step_age_s))


def made(goes_on: bool = False) -> ReplicaEngines[NotedEngine]:
    """Two engines; there has to be a running event loop."""
    return ReplicaEngines({name: NotedEngine() for name in engine_ids("decode-m-x", 2)}, goes_on)


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
        asked = asyncio.create_task(engines.ask(ListHotPrefixes(4)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first, second = engines.all
        [question] = [msgspec.msgpack.decode(sent, type=ListHotPrefixes) for sent in second.sent]
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


def test_engines_go_on_without_one_that_is_lost_and_only_its_calls_end(monkeypatch):
    monkeypatch.setattr(engine_control, "POLL_INTERVAL_S", 0.01)

    async def scenario() -> None:
        engines = made()
        second = engines.all[1]
        unhealthy = asyncio.create_task(engines.until_unhealthy())
        calls = [asyncio.create_task(engine.run_request(request(str(i)))) for i, engine in enumerate(engines.all)]
        await asyncio.sleep(0)
        engines.lose(0, "rank 0 died", ["computes 0"])
        with pytest.raises(EngineLost, match="rank 0 died") as lost:
            await calls[0]
        assert lost.value.doing == ["computes 0"]
        assert lost.value.code == "engine_unavailable", "clients and replays know no other code"
        with pytest.raises(EngineLost, match="rank 0 died"):
            await engines.choose("decode-m-x.dp0").run_request(request("later"))
        assert engines.choose("") is second
        second.report("decode-m-x.dp1", step_age_s=99.0)
        engines.check_health()  # it may be reading experts
        assert [status.engine_id for status in engines.statuses()] == ["decode-m-x.dp1"]
        second.clock = 99.0
        second.report("decode-m-x.dp1", step_age_s=99.0, generation=1)
        engines.check_health()  # it has just gone on, and computes the interrupted step again
        second.clock = 198.0
        second.report("decode-m-x.dp1", step_age_s=198.0, generation=1)
        assert "no step ended for 99 s" in await asyncio.wait_for(unhealthy, 60)
        calls[1].cancel()

    asyncio.run(scenario())


def test_an_engine_that_hangs_is_lost_and_the_replica_ends_only_if_none_is_found(monkeypatch):
    monkeypatch.setattr(engine_control, "POLL_INTERVAL_S", 0.01)

    async def scenario() -> None:
        engines = made(goes_on=True)
        first, second = engines.all
        found: list[str] = []

        def end_hung() -> bool:
            found.append("asked")
            if len(found) == 1:
                engines.lose(0, "rank 0 hangs")
            return len(found) == 1

        first.clock = second.clock = 99.0  # both are silent: the second waits for the first
        engines.check_health()  # else Serve would end the replica
        hung = asyncio.create_task(engines.until_hung(end_hung))
        while first in engines.all:
            await asyncio.sleep(0.01)
        assert not (await asyncio.wait([hung], timeout=0.1))[0], "it may be reading experts"
        second.clock = 999.0
        assert "no status from the engine for 999 s" in await asyncio.wait_for(hung, 60)
        assert found == ["asked", "asked"]

    asyncio.run(scenario())


def test_what_an_engine_is_asked_ends_with_the_engine():
    async def scenario() -> None:
        engines = made()
        asked = asyncio.create_task(engines.all[0].ask(ListHotPrefixes(4), timeout_s=600.0))
        await asyncio.sleep(0)
        engines.lose(0, "rank 0 died")
        with pytest.raises(EngineLost, match="rank 0 died"):
            await asyncio.wait_for(asked, 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("of_other_engine", [False, True])
def test_a_replica_that_has_lost_an_engine_restarts_only_when_it_has_no_requests(monkeypatch, of_other_engine):
    monkeypatch.setattr(replica_engines, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(replica_engines, "IDLE_S", 0.02)

    async def scenario() -> None:
        engines = made()
        idle = asyncio.create_task(engines.until_idle_without_lost())
        call = asyncio.create_task(engines.all[1].run_request(replace(request("1"), of_other_engine=of_other_engine)))
        await asyncio.sleep(0)
        engines.lose(0, "rank 0 died")
        assert not (await asyncio.wait([idle], timeout=0.1))[0], "it has a request"
        call.cancel()
        assert await asyncio.wait_for(idle, 60) == "1 of its engines were lost, and it has no requests now"

    asyncio.run(scenario())
