"""Engines that end by themselves with a request, and what becomes of it and of the others in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from deployments.errors import PoisonRequest
from deployments.frontend import retry
from deployments.poison.named import suspected
from deployments.poison.poison import POISON_S, Poison
from deployments.poison.sequence_trial import SequenceTrial
from engine.black_box import compile_key, compute_key, ended_key, read_key
from engine.errors import EngineUnavailable, ServingError
from engine.wire.generate_request import TRIAL_S, TRIAL_TOKENS, GenerateRequest
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.speculation import Prediction
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import TokenBatch
from tests.deployments.replicas.mortal_pool import Heard, Ingress, Outcome, answer, ingress, listen

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SQL = ModelAdapter("sql", "/adapters/sql", "d1")
FORM = StructuredOutputsParams(regex="[ab]")


def request(name: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"request_id": name, "prompt": list(name.encode()), "params": GREEDY, **fields})


class Engines:
    """Each request goes to the engine with the fewest. If `ends` says so of a request and its number of tokens, its
    engine ends with all requests in it, and another one takes its place at once."""

    def __init__(self, reply_to: str, size: int, ends: Callable[[GenerateRequest, int], bool], outside: bool = False):
        """outside: whether something else has killed it."""
        self.num_ended = 0
        self.heard: dict[str, Heard] | None = None  #: if given, no request is far ahead of what its client has
        self.attempts: list[str] = []
        self._ends, self._outside = ends, outside
        self._engines: list[dict[str, tuple[GenerateRequest, asyncio.Future[None]]]] = [{} for _ in range(size)]
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
        self._socket.connect(reply_to)

    async def generate(self, message: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        self.attempts.append(message.request_id)
        engine, name = min(self._engines, key=len), message.request_id
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        engine[name] = message, ended
        try:
            for delta in answer(message):
                if not ended.done() and self._ends(message, delta.position):
                    self._end(engine)
                if ended.done():
                    return await ended
                batch = TokenBatch(engine_id="e", commands_to="tcp://127.0.0.1:9", step=0, deltas=[delta])
                await self._socket.send(msgspec.msgpack.encode(batch))
                await asyncio.sleep(0.001)
                while self.heard is not None and len(self.heard[name.partition(".")[0]].token_ids) < delta.position - 5:
                    await asyncio.sleep(0.001)
        finally:
            engine.pop(name, None)

    @property
    def live(self) -> set[str]:
        return {name for engine in self._engines for name in engine}

    def _end(self, engine: dict[str, tuple[GenerateRequest, asyncio.Future[None]]]) -> None:
        self.num_ended += 1
        doing = [ended_key(str(self.num_ended))]
        for name, (message, _) in engine.items():
            doing.append(compute_key(name))
            if (lora := message.record(ModelAdapter)) is not None:
                doing.append(read_key(lora.digest))
        for _, ended in engine.values():
            ended.set_exception(EngineUnavailable("rank 0 died", [] if self._outside else doing))
        engine.clear()

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)


async def heard(one: Ingress, engines: Any, message: GenerateRequest, **options: Any) -> Outcome | BaseException:
    so_far = {} if engines.heard is None else engines.heard
    try:
        return await listen(one.generation([message], engines, **options), [message], so_far)
    except ServingError as error:
        return error


def tokens(outcome: Outcome | BaseException) -> list[int]:
    assert isinstance(outcome, Outcome), outcome
    return outcome.heard[0].token_ids


@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_what_ends_two_engines_is_refused_and_what_ran_beside_it_goes_on(size, position):
    async with ingress() as one:
        engines = Engines(one.channel.address, size, lambda r, at: r.request_id.startswith("bad") and at >= position)
        others = [request(f"other-{i}") for i in range(8)]
        found = await asyncio.gather(*(heard(one, engines, r) for r in [*others, request("bad")]))
        assert [tokens(outcome) for outcome in found[:-1]] == [[d.token_ids[0] for d in answer(r)] for r in others]
        assert isinstance(found[-1], PoisonRequest) and found[-1].status == 422
        assert str(found[-1]).startswith("two engines have ended while they computed this request; it is refused")
        assert engines.num_ended == 2
        again = await heard(one, engines, request("bad-again", prompt=list(b"bad")))
        assert isinstance(again, PoisonRequest) and "bad-again" not in engines.attempts
        tokens(await heard(one, engines, request("another")))
        engines.close()


async def test_all_that_name_an_adapter_with_which_engines_end_are_refused_after_two():
    async with ingress() as one:
        engines = Engines(one.channel.address, 1, lambda r, at: r.record(ModelAdapter) == SQL and at >= 3)
        wrong, right = [request(f"sql-{i}").asking(SQL) for i in range(4)], [request(f"other-{i}") for i in range(4)]
        found = await asyncio.gather(*(heard(one, engines, r) for r in [*wrong, *right]))
        assert all(isinstance(error, PoisonRequest) and "read adapter 'sql'" in str(error) for error in found[:4])
        assert [tokens(outcome) for outcome in found[4:]] == [[d.token_ids[0] for d in answer(r)] for r in right]
        assert engines.num_ended == 2
        engines.close()


async def test_who_only_loses_engines_that_were_killed_is_replayed_as_often_as_promised_and_never_refused():
    async with ingress() as one:
        engines = Engines(one.channel.address, 2, lambda r, at: r.request_id.startswith("bad"), outside=True)
        found = await heard(one, engines, request("bad"), max_replays=3)
        assert isinstance(found, EngineUnavailable) and engines.num_ended == 4
        assert engines.attempts == ["bad", "bad.1", "bad.2", "bad.3"]
        tokens(await heard(one, engines, request("good", prompt=list(b"bad"))))
        engines.close()


async def test_who_survives_its_trial_is_no_suspect_any_more():
    def ends(message: GenerateRequest, at: int) -> bool:
        return (message.request_id, at) in {("unlucky", 3), ("unlucky.1", 20)}

    async with ingress() as one:
        engines = Engines(one.channel.address, 1, ends)
        engines.heard = {}
        assert tokens(await heard(one, engines, request("unlucky"))) == [
            d.token_ids[0] for d in answer(request("unlucky"))
        ]
        assert engines.num_ended == 2
        engines.close()


async def test_one_suspect_at_a_time_is_tried():
    tried: set[str] = set()
    most = 0

    def ends(message: GenerateRequest, at: int) -> bool:
        nonlocal most
        given = len(message.prompt) - (message.num_prompt or len(message.prompt))
        if message.on_trial and at - given < TRIAL_TOKENS // 4:
            tried.add(message.request_id)
        else:
            tried.discard(message.request_id)
        most = max(most, len(tried & engines.live))
        return message.request_id == "other-0" and at == 4

    async with ingress() as one:
        engines = Engines(one.channel.address, 1, ends)
        for outcome in await asyncio.gather(*(heard(one, engines, request(f"other-{i}")) for i in range(6))):
            tokens(outcome)
        assert engines.num_ended == 1 and most == 1
        engines.close()


async def test_a_suspect_that_ends_before_it_is_cleared_leaves_its_turn_to_the_next():
    """A stop string ends an answer before its engine does."""
    bad, now = request("bad"), asyncio.get_running_loop().time()
    memory = Poison()
    named = suspected(bad, "bad", [ended_key("a"), compute_key("bad")], began=False)
    assert named is not None and memory.blame(named, [ended_key("a")], False, now) is None
    view: Any = SimpleNamespace(retry=retry.RetryState(bad, 3, now))
    first, second = SequenceTrial(memory, view), SequenceTrial(memory, view)
    await first.attempting()
    waits = asyncio.create_task(second.attempting())
    await asyncio.wait([waits], timeout=0.05)
    assert not waits.done() and second.sending(bad).on_trial
    first.ended("stop", None)
    await asyncio.wait_for(waits, TRIAL_S / 2)
    second.ended("stop", None)


def remembered(bad: GenerateRequest, now: float) -> Poison:
    """The memory of an ingress after two engines have ended with this request."""
    other, memory = Poison(), Poison()
    memory.tell_others = lambda named: other.refuse(named, now)
    for engine in "ab":
        doing = [ended_key(engine), compute_key(bad.request_id)]
        named = suspected(bad, bad.request_id, doing, began=False)
        assert named is not None
        assert (memory.blame(named, doing, engine == "b", now) is None) == (engine == "a")
    with pytest.raises(PoisonRequest):
        other.check(bad, now)
    return memory


def test_what_is_refused_is_tried_again_after_a_while():
    bad = request("bad")
    memory = remembered(bad, 100.0)
    with pytest.raises(PoisonRequest, match="refused for the next 1 s"):
        memory.check(request("other name", prompt=bad.prompt), 100.0 + POISON_S - 1)
    memory.check(bad, 100.0 + POISON_S)
    assert not memory.suspects(bad, 100.0 + POISON_S)
    memory.check(request("other"), 100.0)


def test_one_engine_that_tells_many_requests_of_its_end_counts_once():
    memory, doing = Poison(), [ended_key("a"), read_key("d1")]
    named = suspected(request("r").asking(SQL), "r", doing, began=False)
    assert named is not None
    assert [memory.blame(named, doing, False, 0.0) for _ in range(3)] == [None] * 3
    assert memory.suspects(request("new").asking(SQL), 1.0) and not memory.suspects(request("new"), 1.0)
    two = [ended_key("b"), read_key("d1"), read_key("d2")]
    assert memory.blame(named, two, False, 1.0) is None, "it may have been the other adapter"
    assert memory.blame(named, two, True, 1.0) is not None


@pytest.mark.parametrize(
    ("fields", "doing", "what"),
    [
        ({}, [], None),
        ({}, [compute_key("r")], None),
        ({}, [compute_key("r.1")], "computed this request"),
        ({"needs": {SQL.part: SQL}}, [read_key("d1")], "read adapter 'sql'"),
        ({"needs": {SQL.part: SQL}}, [read_key("d2")], None),
        ({"needs": {SQL.part: SQL}}, [compute_key("r.1")], "computed this request"),
        ({"params": SamplingParams(structured_outputs=FORM)}, [compile_key("regex", "[ab]")], "compiled its grammar"),
        ({"params": SamplingParams(structured_outputs=FORM)}, [compile_key("regex", "[abc]")], None),
    ],
)
def test_a_request_is_suspected_for_what_the_engine_did_with_it(fields, doing, what):
    named = suspected(request("r", **fields), "r.1", doing, began=False)
    assert (named is None) == (what is None) and (named is None or named.what.startswith(str(what)))


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, True),
        ({"client": "other", "timeout_s": 3.0}, True),
        ({"params": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, seed=7)}, True),
        ({"prompt": [1]}, False),
        ({"params": SamplingParams(temperature=0.5)}, False),
        ({"needs": {SQL.part: SQL}}, False),
        ({"hints": {Prediction.part: Prediction([4])}}, False),
    ],
)
def test_it_is_remembered_by_what_decides_what_is_computed(fields, same):
    bad = request("bad")
    memory = remembered(bad, 0.0)
    if same:
        with pytest.raises(PoisonRequest):
            memory.check(msgspec.structs.replace(bad, request_id="new", **fields), 1.0)
    else:
        memory.check(msgspec.structs.replace(bad, request_id="new", **fields), 1.0)
