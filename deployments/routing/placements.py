"""One router's memory of the engines in its pool and of the requests that it placed on them. No clock, no socket."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deployments.routing.prefix_index import PrefixIndex, block_keys
from engine.wire.messages import EngineUpdate
from engine.wire.remote_request import Peer
from engine.wire.stats.engine_stats import EngineLoad


@dataclass(frozen=True, slots=True)
class Placement:
    """One request on one engine, from the router's choice until its prompt is computed there."""

    engine: str
    tokens: int  #: prompt tokens to compute there
    blocks: int  #: KV blocks that it needs besides the cached ones
    keys: Sequence[int]  #: keys of the blocks that the engine will have cached once the prompt is computed
    cached_tokens: int  #: prompt tokens that the router expects to be cached
    embeds: int = 0  #: image embeddings to make there
    adapter: str = ""  #: digest of the adapter that the engine will have once the prompt is computed


@dataclass(slots=True)
class EngineRecord:
    """One engine: its last report, placements that the report does not include yet, and its KV blocks."""

    reported: EngineLoad = field(default_factory=EngineLoad)
    pending: dict[str, Placement] = field(default_factory=dict)  #: placements that no report includes yet, by request
    load: EngineLoad = field(default_factory=EngineLoad)  #: the last report plus the pending placements
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    expected_adapters: Counter[str] = field(
        default_factory=Counter
    )  #: of placements whose prompts are not computed yet
    peer: Peer | None = None  #: the engine, from which others may fetch KV; None if they may not
    held: frozenset[int] = frozenset()  #: keys of the last blocks of prompts that clients hold there
    last_update: int | None = None  #: number of the newest update whose block changes were applied

    def holds(self, adapter: str) -> bool:
        """Return whether the engine has an adapter or will have it. True for a request without an adapter."""
        return not adapter or adapter in self.reported.adapters or adapter in self.expected_adapters

    def total_load(self) -> EngineLoad:
        report, pending = self.reported, self.pending.values()
        return EngineLoad(
            sequences=report.sequences + len(pending),
            queued_tokens=report.queued_tokens + sum(placement.tokens for placement in pending),
            blocks_used=report.blocks_used + sum(placement.blocks for placement in pending),
            slots=report.slots,
            blocks_total=report.blocks_total,
            queued_embeds=report.queued_embeds + sum(placement.embeds for placement in pending),
        )


UNKNOWN = EngineRecord()  # never changed


class Placements:
    """The records of all engines and of all placed requests.

    A report replaces the previous one, and the requests that it lists as admitted are no longer pending. A placement
    also stops being pending when its request ends. So errors never accumulate: a wrong estimate is forgotten with its
    request.
    """

    def __init__(self) -> None:
        self.records: defaultdict[str, EngineRecord] = defaultdict(EngineRecord)  # by engine
        self._placements: dict[str, Placement] = {}
        self._ended: set[str] = set()  # placements whose call has ended, but whose engine has not reported the outcome
        self._missed: set[str] = set()  # placements whose outcome the engine may have reported before its last snapshot

    def engine(self, engine: str) -> EngineRecord:
        """Return the record of the engine. Do not modify it."""
        return self.records.get(engine, UNKNOWN)

    def place(self, request_id: str, placement: Placement) -> None:
        """Record that the request was sent to `placement.engine`, which replaces any earlier engine."""
        self.resolve(request_id)
        self._placements[request_id] = placement
        record = self.records[placement.engine]
        record.pending[request_id] = placement
        record.load = record.total_load()
        record.prefixes.expect(placement.keys)
        record.expected_adapters[placement.adapter] += 1

    def report(self, engine: str, load: EngineLoad, admitted: Iterable[str]) -> None:
        """Record an engine's load, which includes the admitted requests."""
        for request_id in admitted:
            self._settle_load(request_id)
            self._missed.discard(request_id)
        record = self.records[engine]
        record.reported = load
        record.load = record.total_load()

    def update_blocks(self, update: EngineUpdate) -> bool:
        """Apply the update's block changes. Returns False if an earlier update is missing, so that a snapshot is
        needed."""
        record = self.records[update.engine_id]
        if update.snapshot:
            record.prefixes.reset(block_keys(update.stored), update.window_blocks)
            record.peer = update.peer
            placed = {r for r, placement in self._placements.items() if placement.engine == update.engine_id}
            for request_id in self._ended & placed:  # the engine reported these in an update that was lost
                self.resolve(request_id)
            self._missed |= placed.difference(update.admitted, self._ended)
            self._missed &= self._placements.keys()
        elif record.last_update == update.number - 1:
            record.prefixes.update(block_keys(update.stored), block_keys(update.removed))
        else:
            return False
        if update.held is not None:
            record.held = frozenset(block_keys(update.held))
        record.last_update = update.number
        return True

    def end(self, request_id: str, *, confirmed: bool) -> bool:
        """Record the end of a request's call. Returns whether the request was placed.

        confirmed: whether its engine had the request. The engine then reports the prompt's outcome, and the prompt's
        blocks stay expected until that report.
        """
        placement = self._placements.get(request_id)
        if placement is None:
            return False
        reports = self.records[placement.engine].last_update is not None and request_id not in self._missed
        if confirmed and reports:
            self._settle_load(request_id)
            self._ended.add(request_id)
        else:
            self.resolve(request_id)
        return True

    def resolve(self, request_id: str) -> Placement | None:
        """Remove and return a placement whose prompt has been computed or will never be computed."""
        self._settle_load(request_id)
        self._ended.discard(request_id)
        self._missed.discard(request_id)
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            record = self.records[placement.engine]
            record.prefixes.unexpect(placement.keys)
            record.expected_adapters -= Counter((placement.adapter,))
        return placement

    def forget(self, engine: str) -> None:
        """Drop an engine that is gone, with everything placed on it."""
        self.records.pop(engine, None)
        self._placements = {r: p for r, p in self._placements.items() if p.engine != engine}
        self._ended &= self._placements.keys()
        self._missed &= self._placements.keys()

    def check(self) -> None:
        """Raise AssertionError unless all records agree."""
        for name, record in self.records.items():
            assert record.load == record.total_load(), name
            assert all(p.engine == name and self._placements[r] is p for r, p in record.pending.items()), name
        assert all(placement.engine in self.records for placement in self._placements.values())
        assert (self._ended | self._missed) <= self._placements.keys()

    def _settle_load(self, request_id: str) -> None:
        """Record that a report includes a placement's load, or that its request has ended."""
        if (placement := self._placements.get(request_id)) is not None:
            record = self.records[placement.engine]
            if record.pending.pop(request_id, None) is not None:
                record.load = record.total_load()
