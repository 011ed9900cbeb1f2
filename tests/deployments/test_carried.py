"""Calls between processes of two versions."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from deployments.carried import Carried, read_carried
from deployments.replicas.encoded_request import EncodedRequest
from deployments.routing.routing_context import RoutingContext
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Abort
from engine.wire.parts.holds import GiveHolds, ReleaseHolds
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer

HOLDER = KVHolder(Peer("other", "tcp://127.0.0.1:1", 2**63), 2)


class LaterRelease(msgspec.Struct, frozen=True, tag="ReleaseHolds"):
    """ReleaseHolds of the next version."""

    name: str
    client: str | None = None
    within_s: float = 0.0


@pytest.mark.parametrize(
    "record",
    [EncodedRequest.of(GenerateRequest(request_id="r", prompt=[1])), GiveHolds(4), ReleaseHolds("a", "key:b"), HOLDER],
    ids=lambda record: type(record).__name__,
)
def test_who_is_called_gets_the_record_itself(record):
    assert pickle.loads(pickle.dumps([Carried(record)])) == [record]


def test_a_record_of_the_next_version_is_read_without_its_new_field_and_one_of_the_last_with_its_default():
    later = msgspec.msgpack.encode(LaterRelease("a", within_s=2.0))
    assert read_carried(ReleaseHolds, later) == ReleaseHolds("a")
    assert read_carried(LaterRelease, msgspec.msgpack.encode(ReleaseHolds("a", "b"))) == LaterRelease("a", "b")


def test_a_record_without_a_needed_field_is_refused_by_its_name():
    with pytest.raises(msgspec.ValidationError, match="missing required field `name`"):
        read_carried(ReleaseHolds, msgspec.msgpack.encode({"type": "ReleaseHolds"}))


def test_a_call_that_the_last_version_has_pickled_is_read():
    """Pickle names the function and the class, which have to stay where they are."""
    named = b"cdeployments.carried\nread_carried\n(cengine.wire.messages\nAbort\n"
    data = msgspec.msgpack.encode(Abort("a"))
    assert pickle.loads(named + b"B" + len(data).to_bytes(4, "little") + data + b"tR.") == Abort("a")


def test_a_call_carries_who_holds_the_prompt():
    call = RoutingContext()
    call.holder, call.engine = HOLDER, "decode-m-1"
    found = pickle.loads(pickle.dumps(call))
    assert (found.holder, found.engine) == (HOLDER, "decode-m-1")
