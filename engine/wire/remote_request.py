"""Request of a decode engine to a prefill or encode engine; sent in engine/wire/messages.py."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine.wire.part_record import Asking, PartRecord
from engine.wire.sampling_params import SamplingParams


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Name and address of an engine, as other engines know it."""

    engine_id: str
    address: str  #: ZMQ address of its handoff channel
    epoch: int  #: 64 random bits drawn at its start, so that a restarted engine counts as another one


NOBODY = Peer("", "", 0)
"""Stands for the engine that will continue a request that moves, until that engine is known."""


class KVSource(PartRecord, frozen=True, array_like=True):
    """A request that its engine has stopped, and whose KV of all known tokens that engine holds for the engine that
    continues the request."""

    part: ClassVar[str] = "handoffs"
    is_hint: ClassVar[bool] = True

    handoff_id: str
    engine: Peer


class RemoteRequest(Asking, frozen=True, kw_only=True):
    """Asks a prefill engine for a prompt's KV and first token, or an encode engine for an image's embeddings."""

    handoff_id: str  #: never reused: a second attempt for the same request is another handoff
    request_id: str
    attempt: int  #: counts from 1
    token_ids: list[int]
    num_prompt: int  #: length of the actual prompt; later tokens are output of an earlier replica (retry)
    params: SamplingParams
    seed: int  #: the request's seed, resolved, so that both engines draw the same token
    cache_salt: str
    skip: int  #: leading tokens whose KV decode already has, in whole blocks
    fingerprint: str
    decode: Peer
    client: str = ""  #: as in GenerateRequest
    timeout_s: float | None = None  #: seconds left until the request's deadline; None for no deadline
    ttft_slo_s: float | None = None  #: as in GenerateRequest, the seconds left of it
