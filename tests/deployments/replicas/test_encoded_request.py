"""Requests that are encoded once, for all processes on their way."""

from __future__ import annotations

import msgspec

from deployments.replicas.encoded_request import EncodedRequest
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer


def test_the_replica_adds_who_has_the_prefix():
    request = GenerateRequest(request_id="r", prompt=[1, 2, 3], timeout_s=4.0)
    holder = KVHolder(Peer("other", "tcp://127.0.0.1:1", 2**63), 2)
    encoded = EncodedRequest.of(request)
    found = encoded.with_holder(holder)
    assert found.start == msgspec.msgpack.encode(Add(request.asking(holder)))
    assert (found.request_id, found.timeout_s, found.cancel) == ("r", 4.0, encoded.cancel)
