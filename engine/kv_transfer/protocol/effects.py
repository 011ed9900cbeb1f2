"""What the pure part of the protocol wants done; channel.py does it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv_transfer.protocol.events import HandoffEvent
from engine.kv_transfer.protocol.messages import KVWorkerCommand, Message
from engine.wire.handoff_stats import Counters
from engine.wire.remote_prefill import Peer


@dataclass(slots=True)
class Effects:
    """messages: to other engines. commands: to the workers of all own ranks. events: to the own step loop.
    lines: (request id, what happened), for the request's timeline."""

    messages: list[tuple[Peer, Message]] = field(default_factory=list)
    commands: list[KVWorkerCommand] = field(default_factory=list)
    events: list[HandoffEvent] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
