"""A request for an engine, encoded once, so that no process on its way has to decode it."""

from __future__ import annotations

import msgspec

from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.messages import Abort, Add
from engine.wire.parts.handoffs import CancelPrefill, Prefill
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import RemoteRequest


class EncodedRequest(msgspec.Struct, frozen=True):
    """Commands that start and cancel a GenerateRequest or RemoteRequest, in msgpack, and the fields that the control
    actor reads."""

    request_id: str  #: the handoff id of a RemoteRequest
    timeout_s: float | None
    model: ModelIdentity | None  #: model that must serve the request; None for any
    start: bytes
    cancel: bytes
    of_other_engine: bool = False  #: whether it is a RemoteRequest

    @classmethod
    def of(cls, request: GenerateRequest | RemoteRequest) -> EncodedRequest:
        encode = msgspec.msgpack.encode
        if isinstance(request, RemoteRequest):
            name = request.handoff_id
            return cls(name, request.timeout_s, None, encode(Prefill(request)), encode(CancelPrefill(name)), True)
        name = request.request_id
        return cls(name, request.timeout_s, request.model, encode(Add(request)), encode(Abort(name)))

    def with_holder(self, holder: KVHolder) -> EncodedRequest:
        """Return this GenerateRequest with an engine from which KV can be fetched."""
        request = msgspec.msgpack.decode(self.start, type=Add).request
        return self.of(request.asking(holder))
