"""What travels between a decode and a prefill engine (msgspec over ZMQ). See docs/handoff.md.

The ticket goes as a Serve call; all else on the control channel of the engines, off their step loops, and may be lost,
doubled or late: every message is either cumulative or answered, and repeated until it is.
"""

from __future__ import annotations

import msgspec

from engine.messages import TokenLogprob
from engine.sampling_params import SamplingParams


class Party(msgspec.Struct, frozen=True, array_like=True):
    """One engine as it names itself.

    address: of its control channel (ZMQ). epoch: 64 random bits drawn at its start: a restarted engine is another one.
    """

    engine_id: str
    address: str
    epoch: int


class PrefillTicket(msgspec.Struct, frozen=True, kw_only=True):
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
    decode: Party
    timeout_s: float | None = None


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """What prefill sampled after the prompt. chain: hash of the prompt's last block, full or not, which names all
    tokens up to it. cached: prompt tokens that prefill had in its cache."""

    token: int
    logprob: TokenLogprob | None
    chain: bytes
    cached: int


# -- prefill to decode -------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Cumulative: the newest one says all. Sent on acceptance, after every chunk, and in answer to every heartbeat.

    source: who computes. ranks: for each of its ranks, how others reach its memory, by transport.
    blocks: ids at prefill of the blocks from token `skip` on whose KV is complete up to token `upto`.
    first: set once the prompt is computed.
    echo: `sent` of the newest heartbeat, on decode's clock; 0 before the first.
    """

    handoff_id: str
    source: Party
    ranks: list[dict[str, bytes]]
    blocks: list[int]
    upto: int
    first: FirstToken | None
    echo: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Prefill cannot do it, or no longer knows of it."""

    handoff_id: str
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """held: the blocks were the handoff's own until this moment, so what was read is right."""

    handoff_id: str
    held: bool


# -- decode to prefill -------------------------------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Extends the lease. sent: on decode's clock, to be given back."""

    handoff_id: str
    sent: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """All is read. Repeated until answered."""

    handoff_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Decode wants nothing more of it, and reads nothing more."""

    handoff_id: str


Message = Progress | Refused | Released | Heartbeat | Release | Cancel


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """sender: who says it. to_epoch: for whom it is; any other engine drops it, and counts it."""

    sender: Party
    to_epoch: int
    message: Message


# -- between the channel of an engine (rank 0) and the agents of its ranks ------------------------------------


class Read(msgspec.Struct, frozen=True, tag=True):
    """To every rank of decode: read blocks `source_blocks` of the source into `local_blocks`, one for one.

    source_epoch: names the source; ranks: as in Progress.
    """

    read_id: int
    source_epoch: int
    ranks: list[dict[str, bytes]]
    source_blocks: list[int]
    local_blocks: list[int]


class StopRead(msgspec.Struct, frozen=True, tag=True):
    """Write nothing more for this read; answered by ReadEnded, as every read is."""

    read_id: int


class DropSource(msgspec.Struct, frozen=True, tag=True):
    """Forget all that is known of this engine, and close connections to it."""

    source_epoch: int


class ReadEnded(msgspec.Struct, frozen=True, tag=True):
    """From one rank, exactly once per Read: it writes nothing more for it.

    error: None when all of it was read and passed the transport's checks.
    """

    read_id: int
    rank: int
    transport: str
    num_bytes: int
    seconds: float
    error: str | None = None


AgentCommand = Read | StopRead | DropSource
