"""What parts hear of the sequences of a request, and what they may change."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deployments.frontend.generation import LiveGeneration
from deployments.frontend.observers import (
    GenerationObserver,
    Observers,
    Reason,
    RequestSize,
    SequenceObserver,
    SequenceView,
)
from engine.errors import Overloaded, RequestError
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta
from tests.deployments.fake_api import FakeApi, fake_api, says


class Diary(SequenceObserver):
    """Writes down what it hears, and changes nothing."""

    def __init__(self, heard: list[Any], sequence: SequenceView):
        self._heard, self._index = heard, sequence.index

    def waits(self) -> None:
        self._heard.append("waits")

    def admitted(self) -> None:
        self._heard.append("admitted")

    async def attempting(self) -> None:
        self._heard.append("attempting")

    def sent(self, request_id: str) -> None:
        self._heard.append(f"sent {request_id}")

    def delta(self, delta: TokenDelta, num_tokens: int) -> None:
        self._heard.append(num_tokens)

    def ended(self, reason: Reason, error: Exception | None) -> None:
        self._heard.append((reason, error))


def asked(api: FakeApi, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", prompt=[5, 6], params=SamplingParams(ignore_eos=True, **params), reply_to=api.channel.address
    )


def first(api: FakeApi, num_tokens: int) -> str:
    tokenizer = api.model.tokenizer
    return tokenizer.decode(tokenizer.encode("hello world")[:num_tokens])


async def text(api: FakeApi, request: GenerateRequest, **observers: Any) -> str:
    context = replace(api.model.frontend, **observers)
    return "".join([chunk.text async for chunk in LiveGeneration(context, [[request]], "key:alice").chunks()])


async def test_an_observer_hears_of_a_sequence_from_its_wait_to_its_end():
    heard: list[Any] = []
    async with fake_api(says("hello world")) as api:
        assert await text(api, asked(api, max_tokens=3), observers=(lambda view: Diary(heard, view),)) == first(api, 3)
    tokens = [each for each in heard if isinstance(each, int)]
    others = [each for each in heard if not isinstance(each, int)]
    assert others == ["waits", "admitted", "sent r", "attempting", ("length", None)]
    assert sum(tokens) == 3 and heard[-1] == ("length", None)


async def test_an_observer_hears_only_of_tokens_that_the_client_gets_and_once_of_the_end():
    heard: list[Any] = []
    async with fake_api(says("hello world")) as api:
        request = asked(api, max_tokens=11, stop=["w"])
        assert await text(api, request, observers=(lambda view: Diary(heard, view),)) == "hello "
    assert sum(each for each in heard if isinstance(each, int)) <= 7
    assert [each for each in heard if isinstance(each, tuple)] == [("stop", None)]


async def test_observers_change_what_is_sent_and_what_arrives_in_their_order():
    class Shorter(SequenceObserver):
        def sending(self, request: GenerateRequest) -> GenerateRequest:
            params = msgspec.structs.replace(request.params, max_tokens=request.params.max_tokens - 1)
            return msgspec.structs.replace(request, params=params)

    class Halved(Shorter):
        def sending(self, request: GenerateRequest) -> GenerateRequest:
            params = msgspec.structs.replace(request.params, max_tokens=request.params.max_tokens // 2)
            return msgspec.structs.replace(request, params=params)

    class Hidden(SequenceObserver):
        def received(self, delta: TokenDelta) -> TokenDelta:
            return msgspec.structs.replace(delta, token_ids=[x] * len(delta.token_ids))

    async with fake_api(says("hello world")) as api:
        (x,) = api.model.tokenizer.encode("x")
        observers = (lambda view: Shorter(), lambda view: Halved(), lambda view: Hidden(), lambda view: None)
        assert await text(api, asked(api, max_tokens=5), observers=observers) == "xx"
        assert api.engine.added[-1].params.max_tokens == 2


def test_what_an_observer_does_not_override_is_not_called():
    class Quiet(SequenceObserver):
        pass

    class Loud(Quiet):
        def sent(self, request_id: str) -> None: ...

    loud = Loud()
    observers = Observers([Quiet(), loud, SequenceObserver()])
    assert observers.sent == [loud.sent]
    assert observers.delta == observers.received == observers.ended == observers.waits == []


class Gate(GenerationObserver):
    """A block around the request, and an error at one of its doors."""

    def __init__(self, refused: Exception | None, ended: Exception | None):
        self.steps: list[str] = []
        self._refused, self._ended = refused, ended

    def observe(self, size: RequestSize, bill: object) -> GenerationObserver:
        self.steps.append(f"{size.prompt_tokens} tokens")
        return self

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        if self._refused is not None:
            raise self._refused
        self.steps.append("in")
        try:
            yield
        finally:
            self.steps.append("out")

    async def taking(self, num_tokens: int) -> None:
        if self._ended is not None:
            raise self._ended


@pytest.mark.parametrize(
    ("refused", "ended", "steps"),
    [
        (Overloaded("too many"), None, ["2 tokens"]),
        (None, RequestError("enough"), ["2 tokens", "in", "out"]),
        (None, None, ["2 tokens", "in", "out"]),
    ],
)
async def test_a_request_runs_in_the_blocks_of_its_observers_which_may_refuse_or_end_it(refused, ended, steps):
    heard: list[Any] = []
    gate = Gate(refused, ended)
    async with fake_api(says("hello world")) as api:
        options = {"observers": (lambda view: Diary(heard, view),), "generation_observers": (gate.observe,)}
        if refused is None and ended is None:
            assert await text(api, asked(api, max_tokens=2), **options) == first(api, 2)
        else:
            with pytest.raises(type(refused or ended)):
                await text(api, asked(api, max_tokens=2), **options)
            assert heard[-1] == ("refused" if refused else "error", refused or ended)
            assert not api.model.admission.num_running
    assert gate.steps == steps
