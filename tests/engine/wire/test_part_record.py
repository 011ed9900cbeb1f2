"""What a request says to the parts of an engine."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from engine.core.door.inputs import Added
from engine.errors import InvalidParameter, RequestError
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import PartRecord
from engine.wire.parts.speculation import Prediction
from tests.fake_runner import Harness


class Wish(PartRecord, frozen=True):
    part: ClassVar[str] = "wishes"

    of: str


def sent(request: GenerateRequest) -> GenerateRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest)


def test_a_record_is_the_same_here_and_on_the_other_side():
    request = GenerateRequest(request_id="r", prompt=[1]).asking(Wish("a"), Prediction([2]), None)
    assert request.record(Wish) == sent(request).record(Wish) == Wish("a")
    assert request.record(Prediction) == sent(request).record(Prediction) == Prediction([2])
    assert sent(request).asking(Wish("b")).record(Wish) == Wish("b")


def test_an_engine_refuses_what_none_of_its_parts_understands_and_ignores_hints():
    harness = Harness(num_blocks=8, max_model_len=16)
    harness.scheduler.apply(Added(GenerateRequest(request_id="r", prompt=[1]).asking(Prediction([2]))), 0.0)
    with pytest.raises(InvalidParameter, match="needs must be left out: this engine lacks that part, got 'wishes'"):
        harness.scheduler.apply(Added(GenerateRequest(request_id="s", prompt=[1]).asking(Wish("a"))), 0.0)


def test_a_record_of_another_form_is_refused():
    request = GenerateRequest(request_id="r", prompt=[1], hints={"speculation": {"tokens": "many"}})
    with pytest.raises(RequestError, match="the record of speculation is not valid"):
        sent(request).record(Prediction)
