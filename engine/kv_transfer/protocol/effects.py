"""Effects requested by the pure protocol; channel.py carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv_transfer.protocol.messages import KVWorkerCommand, Message
from engine.wire.handoff import HandoffEvent
from engine.wire.remote_request import Peer
from engine.wire.stats.handoff_stats import Counters


@dataclass(slots=True)
class Effects:
    """Effects that the channel must still carry out, and counters that only grow."""

    messages: list[tuple[Peer, Message]] = field(default_factory=list)  #: to other engines
    commands: list[KVWorkerCommand] = field(default_factory=list)  #: to the KV workers of all this engine's ranks
    events: list[HandoffEvent] = field(default_factory=list)  #: to this engine's step loop
    lines: list[tuple[str, str]] = field(default_factory=list)  #: (request id, event) for timelines
    counters: Counters = field(default_factory=Counters)
