"""A request on its way to an engine, in bytes that no process in between decodes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.wire.messages import GenerateRequest
from engine.wire.model_identity import ModelIdentity
from engine.wire.remote_prefill import RemotePrefillRequest


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A GenerateRequest or RemotePrefillRequest in msgpack, beside the fields that the control actor reads."""

    request_id: str  #: the handoff id of a RemotePrefillRequest
    timeout_s: float | None
    model: ModelIdentity | None  #: a replica of another model refuses the request; None goes anywhere
    body: bytes

    @classmethod
    def of(cls, request: GenerateRequest) -> EncodedRequest:
        return cls(request.request_id, request.timeout_s, request.model, msgspec.msgpack.encode(request))

    @classmethod
    def of_prefill(cls, request: RemotePrefillRequest) -> EncodedRequest:
        return cls(request.handoff_id, request.timeout_s, None, msgspec.msgpack.encode(request))
