"""What a decode engine asks of a prefill engine. Apart from messages.py, so that engine/wire/messages.py can carry it."""

from __future__ import annotations

import msgspec

from engine.wire.sampling_params import SamplingParams


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """One engine as it names itself.

    address: of its control channel (ZMQ). epoch: 64 random bits drawn at its start: a restarted engine is another one.
    """

    engine_id: str
    address: str
    epoch: int


class RemotePrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a prefill engine to compute a prompt and the first token after it.

    handoff_id: unique for ever: a second attempt for the same request is another handoff.
    token_ids, num_prompt: the sequence; tokens from `num_prompt` on are output of an earlier replica (replay).
    seed: the request's, resolved, so that both sides draw the same token.
    skip: leading tokens whose KV decode has (whole blocks).
    timeout_s: seconds that are left of the request's time; None for no limit.
    """

    handoff_id: str
    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    cache_salt: str
    skip: int
    fingerprint: str
    decode: Peer
    timeout_s: float | None = None
