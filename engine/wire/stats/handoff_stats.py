"""Statistics of a handoff channel: live handoffs for /debug/handoffs, totals for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

Role = Literal["decode", "prefill"]
PeerPool = Literal["prefill", "encode"]  # of engines that compute for others


class HandoffInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live handoff as seen by one of its two engines."""

    handoff_id: str
    request_id: str
    role: Role
    peer: str  #: id of the other engine; empty until it is known
    state: str
    age_s: float  #: seconds since this engine opened or accepted it
    deadline_s: float  #: seconds until this engine gives up if no message arrives
    num_bytes: int = 0  #: bytes read so far (decode)


class HandoffStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one engine since its start, and the number of its live handoffs."""

    live: int = 0
    results: dict[str, dict[str, int]] = {}  #: ended handoffs by result (received, failed, closed) and reason
    phase_seconds: dict[str, tuple[int, float]] = {}
    """(count, sum of seconds) by phase. Decode: `accept` (dispatch to first answer), `compute` (to the first token),
    `exposed` (first token to all blocks read; the client waits for this part of the transfer), `release`, `total`, and
    `read` (each read of each rank). Prefill: `held` (first token to the end of the lease)."""
    bytes_read: dict[str, int] = {}  #: by transport
    bytes_overlapped: int = 0  #: bytes that were read before the first token was known
    lease_expiries: int = 0  #: handoffs of a prefill engine whose decode engine fell silent
    stale_messages: int = 0  #: messages to or about a handoff or an engine that no longer exists
    quarantined: list[str] = []  #: engines that get no prefill requests for now because the link to them failed


@dataclass(slots=True)
class Counters:
    """Running totals from which HandoffStats are made."""

    results: dict[str, dict[str, int]] = field(default_factory=dict)
    phase_seconds: dict[str, tuple[int, float]] = field(default_factory=dict)
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_overlapped: int = 0
    lease_expiries: int = 0
    stale_messages: int = 0

    def ended(self, result: str, reason: str) -> None:
        reasons = self.results.setdefault(result, {})
        reasons[reason] = reasons.get(reason, 0) + 1

    def phase(self, name: str, seconds: float) -> None:
        count, total = self.phase_seconds.get(name, (0, 0.0))
        self.phase_seconds[name] = (count + 1, total + seconds)

    def read(self, transport: str, num_bytes: int, seconds: float, overlapped: bool) -> None:
        self.phase("read", seconds)
        self.bytes_read[transport] = self.bytes_read.get(transport, 0) + num_bytes
        if overlapped:
            self.bytes_overlapped += num_bytes

    def stats(self, live: int, quarantined: list[str]) -> HandoffStats:
        return HandoffStats(
            live=live,
            results={result: dict(reasons) for result, reasons in self.results.items()},
            phase_seconds=dict(self.phase_seconds),
            bytes_read=dict(self.bytes_read),
            bytes_overlapped=self.bytes_overlapped,
            lease_expiries=self.lease_expiries,
            stale_messages=self.stale_messages,
            quarantined=quarantined,
        )
