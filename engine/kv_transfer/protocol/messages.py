"""What travels between a decode and a prefill engine (msgspec over ZMQ). See docs/handoff.md.

The prefill request goes as a Serve call; all else on the control channel of the engines, off their step loops, and may be lost,
doubled or late: every message is either cumulative or answered, and repeated until it is.
"""

from __future__ import annotations

import msgspec

from engine.wire.messages import TokenLogprob
from engine.wire.remote_prefill import Peer
from engine.wire.timeline import TimelineEvent


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """What prefill sampled after the prompt. prompt_hash: hash of the prompt's last block, full or not, which names all
    tokens up to it. cached: prompt tokens that prefill had in its cache. timeline: what happened to the
    prompt there."""

    token: int
    logprob: TokenLogprob | None
    prompt_hash: bytes
    cached: int
    timeline: list[TimelineEvent] = []


# In all messages, lease counts the prefill requests that prefill has accepted: one that comes twice gets other blocks.

# -- prefill to decode -------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Cumulative: the newest one says all. Sent on acceptance, after every chunk, and in answer to every heartbeat.

    ranks: for each rank of the sender, how others reach its memory, by transport.
    blocks: ids at prefill of the blocks from token `skip` on whose KV is complete up to token `upto`.
    first: set once the prompt is computed.
    echo: number of the newest heartbeat; 0 before the first. The blocks were the handoff's own when it came.
    """

    handoff_id: str
    lease: int
    ranks: list[dict[str, bytes]]
    blocks: list[int]
    upto: int
    first: FirstToken | None
    echo: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Prefill cannot do it, or no longer knows of it. lease: 0 if it was never accepted."""

    handoff_id: str
    lease: int
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """held: the blocks were the handoff's own until this lease was released, so what was read is right."""

    handoff_id: str
    lease: int
    held: bool


# -- decode to prefill -------------------------------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Extends the lease, and asks for Progress. number: counts from 1."""

    handoff_id: str
    lease: int
    number: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """All is read. Repeated until answered."""

    handoff_id: str
    lease: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Decode wants nothing more of it, and reads nothing more."""

    handoff_id: str
    lease: int


Message = Progress | Refused | Released | Heartbeat | Release | Cancel


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """sender: who says it. to_epoch: for whom it is; any other engine drops it, and counts it."""

    sender: Peer
    to_epoch: int
    message: Message


# -- between the channel of an engine (rank 0) and the workers of its ranks ------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The first command to an agent. reply_to: ZMQ address (PULL) for its answers."""

    reply_to: str


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

    error: None when all of it was read and passed the transport's checks; `stopped` after StopRead or DropSource.
    """

    read_id: int
    rank: int
    transport: str
    num_bytes: int
    seconds: float
    error: str | None = None


KVWorkerCommand = Attach | Read | StopRead | DropSource
