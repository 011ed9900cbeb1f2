"""What each engine has to do, as far as one router knows. No clock, no socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.wire.messages import EngineLoad


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """What one request adds to the load of the engine that it was sent to.

    tokens: of its prompt that have to be computed there. blocks: of KV that it needs there beside those that are there.
    """

    engine: str
    tokens: int
    blocks: int


@dataclass(slots=True)
class _Sum:
    sequences: int = 0
    tokens: int = 0
    blocks: int = 0


class LoadTracker:
    """The last report of each engine, and what was sent there that the report does not have in it yet.

    A report is the truth: it replaces the one before, and ends the charges of the requests that it names as admitted. A
    charge also ends with its request. So nothing adds up over time, and a wrong charge is gone with its request.
    """

    def __init__(self) -> None:
        self._reports: dict[str, EngineLoad] = {}
        self._pending: dict[str, PendingLoad] = {}
        self._sums: dict[str, _Sum] = {}

    def place(self, request_id: str, charge: PendingLoad) -> None:
        """The request is sent to `charge.engine`; if it was sent elsewhere before, it is not there."""
        self.end(request_id)
        self._pending[request_id] = charge
        self._add(charge, 1)

    def report(self, engine: str, load: EngineLoad, admitted: Iterable[str]) -> None:
        """admitted: requests that are in `load`."""
        self._reports[engine] = load
        for request_id in admitted:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """The request has ended, or its charge is in a report."""
        charge = self._pending.pop(request_id, None)
        if charge is not None and charge.engine in self._sums:
            self._add(charge, -1)

    def forget(self, engine: str) -> None:
        """The engine is gone. What was sent there ends as it would."""
        self._reports.pop(engine, None)
        self._sums.pop(engine, None)
        self._pending = {name: charge for name, charge in self._pending.items() if charge.engine != engine}

    def load(self, engine: str) -> EngineLoad:
        """The last report with all charges on top. Of an engine that has not reported, the charges alone."""
        report, pending = self._reports.get(engine, EngineLoad()), self._sums.get(engine)
        if pending is None or not pending.sequences:
            return report
        return EngineLoad(
            sequences=report.sequences + pending.sequences,
            queued_tokens=report.queued_tokens + pending.tokens,
            blocks_used=report.blocks_used + pending.blocks,
            slots=report.slots,
            blocks_total=report.blocks_total,
        )

    @property
    def engines(self) -> set[str]:
        """All of which anything is known."""
        return {*self._reports, *self._sums}

    def pending(self, engine: str) -> list[str]:
        """Requests that were sent to the engine and are in no report yet."""
        return [name for name, charge in self._pending.items() if charge.engine == engine]

    def _add(self, charge: PendingLoad, sign: int) -> None:
        pending = self._sums.setdefault(charge.engine, _Sum())
        pending.sequences += sign
        pending.tokens += sign * charge.tokens
        pending.blocks += sign * charge.blocks

    def check(self) -> None:
        """Raise AssertionError unless the sums are those of the charges."""
        for engine, pending in self._sums.items():
            charges = [charge for charge in self._pending.values() if charge.engine == engine]
            assert pending == _Sum(len(charges), sum(c.tokens for c in charges), sum(c.blocks for c in charges))
        assert all(charge.engine in self._sums for charge in self._pending.values()), "a charge is in no sum"
