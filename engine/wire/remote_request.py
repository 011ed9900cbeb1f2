"""The request of a decode engine to a prefill or encode engine; engine/wire/messages.py carries it."""

from __future__ import annotations

import msgspec

from engine.wire.multimodal import MultiModalFeatureSpec
from engine.wire.sampling_params import SamplingParams


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """An engine as it names itself to others."""

    engine_id: str
    address: str  #: ZMQ address of its handoff channel
    epoch: int  #: 64 random bits drawn at its start: a restarted engine is another one


class RemoteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a prefill engine for a prompt and the first token after it, or an encode engine for an image."""

    handoff_id: str  #: never used twice: a second attempt for the same request is another handoff
    request_id: str
    attempt: int  #: counts from 1
    token_ids: list[int]
    num_prompt: int  #: tokens from here on are output of an earlier replica (retry)
    params: SamplingParams
    seed: int  #: the request's seed, resolved, so that both engines draw the same token
    cache_salt: str
    skip: int  #: leading tokens whose KV decode has, in whole blocks
    fingerprint: str
    decode: Peer
    timeout_s: float | None = None  #: seconds left until the request's deadline; None for no deadline
    mm_features: list[MultiModalFeatureSpec] = []  #: images of the prompt, with their pixels
