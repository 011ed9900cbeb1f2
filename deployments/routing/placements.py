"""One router's memory: the engines of its pool and the requests it placed on them. No clock, no socket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, field

from deployments.routing.prefix_index import PrefixIndex, block_keys
from engine.wire.messages import EngineLoad, EngineUpdate


@dataclass(slots=True)
class Placement:
    """One request on one engine, from the router's choice until the engine has computed its prompt."""

    engine: str
    tokens: int  #: prompt tokens that have to be computed there
    blocks: int  #: KV blocks that it takes beside the cached ones
    keys: Sequence[int]  #: blocks that the engine will have cached once the prompt is computed
    cached_tokens: int  #: prompt tokens that the router expects to be cached
    pending: bool = True  #: the engine's reports do not include it yet
    ended: bool = False  #: its call is over, and only the engine's last word on the prompt is missing


@dataclass(slots=True)
class EngineRecord:
    """One engine: its last report, the placements that this report misses, and its KV blocks."""

    reported: EngineLoad = field(default_factory=EngineLoad)
    pending_sequences: int = 0
    pending_tokens: int = 0
    pending_blocks: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    last_update: int | None = None  #: number of the newest update whose block changes were applied

    def add_pending(self, placement: Placement, sign: int) -> None:
        self.pending_sequences += sign
        self.pending_tokens += sign * placement.tokens
        self.pending_blocks += sign * placement.blocks

    @property
    def load(self) -> EngineLoad:
        """The last report plus all pending placements."""
        report = self.reported
        if not self.pending_sequences:
            return report
        return EngineLoad(
            sequences=report.sequences + self.pending_sequences,
            queued_tokens=report.queued_tokens + self.pending_tokens,
            blocks_used=report.blocks_used + self.pending_blocks,
            slots=report.slots,
            blocks_total=report.blocks_total,
        )


UNKNOWN = EngineRecord()  # never changed


class Placements:
    """One record per engine and one per request.

    A report is the truth: it replaces the one before, and the requests that it names as admitted are no longer pending.
    A placement also stops being pending when its request ends. So nothing adds up over time, and a wrong estimate is
    gone with its request.
    """

    def __init__(self) -> None:
        self._engines: defaultdict[str, EngineRecord] = defaultdict(EngineRecord)
        self._placements: dict[str, Placement] = {}

    @property
    def engines(self) -> KeysView[str]:
        return self._engines.keys()

    def engine(self, engine: str) -> EngineRecord:
        """Return what is known of the engine, for reading only."""
        return self._engines.get(engine, UNKNOWN)

    def place(self, request_id: str, placement: Placement) -> None:
        """Record that the request was sent to `placement.engine`, and no longer waits at another."""
        self.resolve(request_id)
        self._placements[request_id] = placement
        record = self._engines[placement.engine]
        record.add_pending(placement, 1)
        record.prefixes.expect(placement.keys)

    def report(self, engine: str, load: EngineLoad, admitted: Iterable[str]) -> None:
        """Take over the engine's load, which includes the admitted requests."""
        self._engines[engine].reported = load
        for request_id in admitted:
            if (placement := self._placements.get(request_id)) is not None:
                self._settle_load(placement)

    def update_blocks(self, update: EngineUpdate) -> bool:
        """Apply the update's block changes. Return False if an update before it is missing: a snapshot is needed."""
        record = self._engines[update.engine_id]
        if update.snapshot:
            record.prefixes.reset(block_keys(update.stored))
            lost = [r for r, p in self._placements.items() if p.ended and p.engine == update.engine_id]
            for request_id in lost:  # what the engine said about them was in an update that never came
                self.resolve(request_id)
        elif record.last_update == update.number - 1:
            record.prefixes.update(block_keys(update.stored), block_keys(update.removed))
        else:
            return False
        record.last_update = update.number
        return True

    def end(self, request_id: str, *, confirmed: bool) -> bool:
        """End the request's call; return whether it was placed.

        confirmed: its engine had the request, and so will say what became of the prompt. Its blocks stay expected
        until then.
        """
        placement = self._placements.get(request_id)
        if placement is None:
            return False
        if confirmed and self._engines[placement.engine].last_update is not None:
            self._settle_load(placement)
            placement.ended = True
        else:
            self.resolve(request_id)
        return True

    def resolve(self, request_id: str) -> Placement | None:
        """Drop and return the placement: its prompt is computed, or never will be."""
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            self._settle_load(placement)
            self._engines[placement.engine].prefixes.unexpect(placement.keys)
        return placement

    def forget(self, engine: str) -> None:
        """Drop the engine, which is gone, with everything placed on it."""
        self._engines.pop(engine, None)
        self._placements = {r: p for r, p in self._placements.items() if p.engine != engine}

    def pending(self, engine: str) -> list[str]:
        """Ids of requests that were sent to the engine and are in none of its reports yet."""
        return [r for r, placement in self._placements.items() if placement.pending and placement.engine == engine]

    def check(self) -> None:
        """Raise AssertionError unless each engine's sums are those of its pending placements."""
        for name, record in self._engines.items():
            pending = [p for p in self._placements.values() if p.pending and p.engine == name]
            sums = (len(pending), sum(p.tokens for p in pending), sum(p.blocks for p in pending))
            assert sums == (record.pending_sequences, record.pending_tokens, record.pending_blocks)
        assert all(placement.engine in self._engines for placement in self._placements.values())
        assert EngineRecord(prefixes=UNKNOWN.prefixes) == UNKNOWN, "the record of unknown engines has changed"

    def _settle_load(self, placement: Placement) -> None:
        if placement.pending:
            placement.pending = False
            self._engines[placement.engine].add_pending(placement, -1)
