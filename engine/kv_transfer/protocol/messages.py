"""Messages between a decode and a prefill engine, and between a channel and its KV workers (msgspec over ZMQ).

The prefill request itself goes as a Serve call. All else goes over the channels of the engines, off their step loops,
and may be lost, doubled or late: every message is either cumulative or answered, and repeated until it is. In all of
them `lease` counts the prefill requests that the prefill engine has accepted: a request that comes twice gets other
blocks. See docs/handoff.md.
"""

from __future__ import annotations

import msgspec

from engine.wire.handoff import FirstToken
from engine.wire.remote_request import Peer

# -- prefill to decode -------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Complete state of a prompt at prefill; the newest message replaces all others.

    Sent on acceptance, after every chunk, and in answer to every heartbeat.
    """

    handoff_id: str
    lease: int
    ranks: list[dict[str, bytes]]  #: how others reach the memory of each rank of the sender, by transport
    blocks: list[int]  #: blocks at prefill, as in ReportProgress, whose KV is complete up to token `upto`
    upto: int
    first: FirstToken | None  #: set once the prompt is computed
    echo: int  #: newest heartbeat, 0 before the first; the blocks belonged to the handoff when it came


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Prefill cannot compute the prompt, or no longer knows of it."""

    handoff_id: str
    lease: int  #: 0 if the request was never accepted
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """Answers Release."""

    handoff_id: str
    lease: int
    held: bool  #: the blocks belonged to the handoff until this release, so what was read is correct


# -- decode to prefill -------------------------------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Extends the lease, and asks for Progress."""

    handoff_id: str
    lease: int
    number: int  #: counts from 1


class Release(msgspec.Struct, frozen=True, tag=True):
    """All blocks are read. Repeated until answered."""

    handoff_id: str
    lease: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Decode wants nothing more of the handoff, and reads nothing more."""

    handoff_id: str
    lease: int


Message = Progress | Refused | Released | Heartbeat | Release | Cancel


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with its sender and its receiver."""

    sender: Peer
    to_epoch: int  #: the engine it is for; any other engine drops it, and counts it
    message: Message


# -- between the channel of an engine (rank 0) and the KV workers of its ranks ------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The first command to a KV worker: where to send its answers."""

    reply_to: str  #: ZMQ address (PULL)


class Read(msgspec.Struct, frozen=True, tag=True):
    """Command to every rank of decode: read `source_blocks` of the source into `local_blocks`, one for one."""

    read_id: int
    source_epoch: int  #: names the source
    ranks: list[dict[str, bytes]]  #: as in Progress
    source_blocks: list[int]
    local_blocks: list[int]
    group: int = 0  #: of layers, whose KV it is


class StopRead(msgspec.Struct, frozen=True, tag=True):
    """Write nothing more for this read; answered by ReadEnded, as every read is."""

    read_id: int


class DropSource(msgspec.Struct, frozen=True, tag=True):
    """Forget all that is known of this engine, and close connections to it."""

    source_epoch: int


class ReadEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended a read, and writes nothing more for it. Sent exactly once per Read."""

    read_id: int
    rank: int
    transport: str
    num_bytes: int
    seconds: float
    error: str | None = None
    """None when all blocks were read and passed the transport's checks; `stopped` after StopRead or DropSource."""


class RankRefusals(msgspec.Struct, frozen=True, tag=True):
    """All that a rank's sockets have refused since its start. Ranks above 0 tell when it changes."""

    rank: int
    counts: dict[str, dict[str, int]]  #: by socket and reason (engine/distributed/refusals.py)


KVWorkerAnswer = ReadEnded | RankRefusals
KVWorkerCommand = Attach | Read | StopRead | DropSource
