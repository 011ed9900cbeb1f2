"""One router's memory: the engines of its pool and the requests it placed on them. No clock, no socket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deployments.routing.prefix_index import PrefixIndex, block_keys
from engine.wire.messages import EngineLoad, EngineUpdate


@dataclass(frozen=True, slots=True)
class Placement:
    """One request on one engine, from the router's choice until the engine has computed its prompt."""

    engine: str
    tokens: int  #: prompt tokens that have to be computed there
    blocks: int  #: KV blocks that it takes in addition to the cached ones
    keys: Sequence[int]  #: blocks that the engine will have cached once the prompt is computed
    cached_tokens: int  #: prompt tokens that the router expects to be cached
    embeds: int = 0  #: embeddings of images that have to be made there


@dataclass(slots=True)
class EngineRecord:
    """One engine: its last report, the placements that this report misses, and its KV blocks."""

    reported: EngineLoad = field(default_factory=EngineLoad)
    pending: dict[str, Placement] = field(default_factory=dict)  #: by request: the placements that no report includes
    load: EngineLoad = field(default_factory=EngineLoad)  #: the last report plus the pending placements
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    last_update: int | None = None  #: number of the newest update whose block changes were applied

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
    """One record per engine and one per request.

    A report is the truth: it replaces the one before, and the requests that it names as admitted are no longer pending.
    A placement also stops being pending when its request ends. So nothing adds up over time, and a wrong estimate is
    gone with its request.
    """

    def __init__(self) -> None:
        self.records: defaultdict[str, EngineRecord] = defaultdict(EngineRecord)  # by engine
        self._placements: dict[str, Placement] = {}
        self._ended: set[str] = set()  # placements whose call is over: the engine's last word on the prompt is missing

    def engine(self, engine: str) -> EngineRecord:
        """Return what is known of the engine, for reading only."""
        return self.records.get(engine, UNKNOWN)

    def place(self, request_id: str, placement: Placement) -> None:
        """Record that the request was sent to `placement.engine`, and no longer waits at another."""
        self.resolve(request_id)
        self._placements[request_id] = placement
        record = self.records[placement.engine]
        record.pending[request_id] = placement
        record.load = record.total_load()
        record.prefixes.expect(placement.keys)

    def report(self, engine: str, load: EngineLoad, admitted: Iterable[str]) -> None:
        """Take over the engine's load, which includes the admitted requests."""
        for request_id in admitted:
            self._settle_load(request_id)
        record = self.records[engine]
        record.reported = load
        record.load = record.total_load()

    def update_blocks(self, update: EngineUpdate) -> bool:
        """Apply the update's block changes. Return False if an update before it is missing: a snapshot is needed."""
        record = self.records[update.engine_id]
        if update.snapshot:
            record.prefixes.reset(block_keys(update.stored))
            # what the engine said about these was in an update that never came
            for request_id in [r for r in self._ended if self._placements[r].engine == update.engine_id]:
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
        if confirmed and self.records[placement.engine].last_update is not None:
            self._settle_load(request_id)
            self._ended.add(request_id)
        else:
            self.resolve(request_id)
        return True

    def resolve(self, request_id: str) -> Placement | None:
        """Drop and return the placement: its prompt is computed, or never will be."""
        self._settle_load(request_id)
        self._ended.discard(request_id)
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            self.records[placement.engine].prefixes.unexpect(placement.keys)
        return placement

    def forget(self, engine: str) -> None:
        """Drop the engine, which is gone, with everything placed on it."""
        self.records.pop(engine, None)
        self._placements = {r: p for r, p in self._placements.items() if p.engine != engine}
        self._ended &= self._placements.keys()

    def check(self) -> None:
        """Raise AssertionError unless all records agree."""
        for name, record in self.records.items():
            assert record.load == record.total_load(), name
            assert all(p.engine == name and self._placements[r] is p for r, p in record.pending.items()), name
        assert all(placement.engine in self.records for placement in self._placements.values())
        assert self._ended <= self._placements.keys()

    def _settle_load(self, request_id: str) -> None:
        """The placement is in a report now, or is over."""
        if (placement := self._placements.get(request_id)) is not None:
            record = self.records[placement.engine]
            if record.pending.pop(request_id, None) is not None:
                record.load = record.total_load()
