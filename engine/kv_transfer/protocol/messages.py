"""Messages between a decode and a prefill engine, and between a channel and its KV workers (msgspec over ZMQ).

The prefill request itself is a Serve call. All other messages go over the engines' channels, outside their step loops,
and may be lost, duplicated or late. So every message is either cumulative, or repeated until it is answered. In all of
them `lease` is the number that the prefill engine gave to its acceptance: if it accepts a request again, number and
blocks are new. See docs/handoff.md.
"""

from __future__ import annotations

import msgspec

from engine.wire.handoff import NO_COST, FirstToken, PromptCost
from engine.wire.remote_request import Peer

# -- prefill to decode -------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Complete state of a prompt at prefill. The newest message replaces all others.

    Sent on acceptance, after every chunk, and in answer to every heartbeat.
    """

    handoff_id: str
    lease: int
    ranks: list[dict[str, bytes]]  #: address of each rank's memory at the sender, by transport
    blocks: list[int]  #: blocks at prefill, as in ReportProgress, whose KV is complete up to token `upto`
    upto: int
    first: FirstToken | None  #: set once the prompt is computed
    echo: int  #: newest heartbeat received, 0 before the first; the blocks belonged to the handoff at that time
    cost: PromptCost = NO_COST


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Says that prefill cannot compute the prompt, or has forgotten it already."""

    handoff_id: str
    lease: int  #: 0 if the request was never accepted, or the claim came too late
    reason: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """Answer to Release."""

    handoff_id: str
    lease: int
    held: bool  #: whether the blocks belonged to the handoff until this release, so that the KV read is correct
    byte_ns: float = 0.0  #: PromptCost.byte_ns until then


# -- decode to prefill -------------------------------------------------------------------------------------


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Asks for the KV of a request that moves. Repeated until answered by Progress or Refused."""

    handoff_id: str
    skip: int  #: as in RemoteRequest
    fingerprint: str


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Asks for blocks in the prefix cache, by name. Repeated until answered by Progress or Refused."""

    handoff_id: str
    request_id: str
    skip: int  #: as in RemoteRequest
    upto: int  #: number of tokens up to whose end the blocks have the KV
    fingerprint: str
    names: list[bytes]  #: as in OpenHandoff
    timeout_s: float | None = None  #: seconds that a request waits for the blocks


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Extends the lease and asks for Progress."""

    handoff_id: str
    lease: int
    number: int  #: counts from 1


class Release(msgspec.Struct, frozen=True, tag=True):
    """Says that decode has read all blocks. Repeated until answered."""

    handoff_id: str
    lease: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Says that decode needs nothing more from the handoff, and has stopped reading."""

    handoff_id: str
    lease: int
    paid_ns: int = 0  #: as in CancelHandoff


Message = Progress | Refused | Released | Claim | Fetch | Heartbeat | Release | Cancel


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with its sender and its receiver."""

    sender: Peer
    to_epoch: int  #: epoch of the receiving engine; any other engine drops the message and counts it
    message: Message


# -- between the channel of an engine (rank 0) and the KV workers of its ranks ------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The first command to a KV worker: where to send answers."""

    reply_to: str  #: ZMQ address (PULL)


class Read(msgspec.Struct, frozen=True, tag=True):
    """Command to every rank of decode: read `source_blocks[i]` of the source into `local_blocks[i]`, for all i."""

    read_id: int
    source_epoch: int  #: epoch that identifies the source
    ranks: list[dict[str, bytes]]  #: as in Progress
    source_blocks: list[int]
    local_blocks: list[int]
    group: int = 0  #: KV cache group of the blocks


class StopRead(msgspec.Struct, frozen=True, tag=True):
    """Command to stop a read, and to write nothing more for it. The read's ReadEnded is the answer."""

    read_id: int


class DropSource(msgspec.Struct, frozen=True, tag=True):
    """Command to forget an engine, and to close all connections to it."""

    source_epoch: int


class ReadEnded(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank has ended a read and writes nothing more for it. Sent exactly once per Read."""

    read_id: int
    rank: int
    transport: str
    num_bytes: int
    seconds: float
    error: str | None = None
    """None when all blocks were read and passed the transport's checks; `stopped` after StopRead or DropSource."""


class RankRefusals(msgspec.Struct, frozen=True, tag=True):
    """Totals of the messages that a rank's sockets have refused since its start. Ranks above 0 send them when they
    change."""

    rank: int
    counts: dict[str, dict[str, int]]  #: by socket and reason (engine/distributed/refusals.py)


KVWorkerAnswer = ReadEnded | RankRefusals
KVWorkerCommand = Attach | Read | StopRead | DropSource
