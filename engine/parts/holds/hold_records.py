"""Writes holds to the tiers that survive a restart, and restores them from there. Pure Python."""

from __future__ import annotations

import logging

from engine.parts.holds.hold_table import Hold, HoldTable, refused
from engine.parts.kv_tiers.kv_offloading import KVOffloading, NoTiersBelow
from engine.parts.kv_tiers.saved_holds import FoundHold
from engine.parts.kv_tiers.tier import Tier
from engine.wire.parts.holds import HoldEnd, HoldMark
from engine.wire.parts.kv_offload import SavedHold

logger = logging.getLogger(__name__)

SAVE_S = 1.0  # between two writes of one hold, since each use changes its end


class HoldRecords:
    """Keeps what is written about the holds of a table on disk and in the store up to date."""

    def __init__(self, table: HoldTable, below: KVOffloading | NoTiersBelow, block_size: int, max_ttl_s: float):
        """max_ttl_s: longest time of a hold, in seconds."""
        self._table, self._below, self._block_size, self._max_ttl_s = table, below, block_size, max_ttl_s
        self._changed: set[Hold] = set()  # since they were written

    def changed(self, hold: Hold) -> None:
        """Write a hold again soon, because its end has changed."""
        self._changed.add(hold)

    def save(self, hold: Hold, now: float) -> None:
        """Write a hold to its tiers that survive a restart."""
        self._changed.discard(hold)
        hold.saved_at = now
        saved = SavedHold(
            hold.client, hold.name, hold.response_id, hold.hashes, hold.needed, hold.ttl_s, hold.expires_at
        )
        self._below.saved.save(saved, self._below.saved.lasting(hold.tiers), now)

    def save_changed(self, now: float) -> None:
        """Write the holds that have changed, each at most once in SAVE_S."""
        for hold in [hold for hold in self._changed if now >= hold.saved_at + SAVE_S]:
            self.save(hold, now)

    def drop(self, hold: Hold, why: HoldEnd | None) -> None:
        """Delete what is written about a hold that ends. why: as for HoldTable.end."""
        self._changed.discard(hold)
        # another engine may have renewed an expired hold in the store, which is deleted there some time later
        written = [t for t in self._below.saved.lasting(hold.tiers) if why != "expired" or t.name != "store"]
        self._below.saved.drop(*hold.end, written)

    def drop_from(self, hold: Hold, tier: Tier) -> None:
        """Delete what is written about a hold in one tier, because that tier has lost its blocks."""
        self._below.saved.drop(*hold.end, self._below.saved.lasting([tier]))

    def dropped(self) -> list[Hold]:
        """Return the holds of an earlier start that another engine has deleted since the last call, because it serves
        their conversations now."""
        found = [self._table.by_end.get((saved.client, saved.hashes[-1])) for saved in self._below.saved.take_dropped()]
        return [hold for hold in found if hold is not None and not hold.request_id]

    def restore(self, now: float) -> None:
        """Grant or refuse the holds that an earlier start has written. Renews those that this engine has already."""
        for found in self._below.saved.take_found(now):
            self._restore(found, now)

    def _restore(self, found: FoundHold, now: float) -> None:
        saved, ends_at = found.hold, now + min(found.left_s, self._max_ttl_s)
        if (same := self._table.by_end.get((saved.client, saved.hashes[-1]))) is not None:
            same.renew(saved.ttl_s, ends_at)
            if same.tiers and found.tier not in same.tiers and found.tier.has_all(same.keys):
                self._table.keep_in(same, [found.tier])
            return
        if not found.is_new:
            return
        if found.left_s <= 0:
            self._table.ended["expired"] += 1
            self._unsave(saved, found.tier)
            return
        hold = Hold(
            saved.client,
            saved.name,
            saved.response_id,
            "",
            saved.hashes,
            saved.needed,
            [[] for _ in saved.needed],
            saved.ttl_s,
            ends_at,
        )
        mark = HoldMark(len(saved.hashes) * self._block_size, saved.ttl_s)
        if self._table.num_groups == len(saved.needed) and found.tier.has_all(hold.keys):
            refusal = self._table.lacks(mark, hold)
        else:
            refusal = refused(mark, "not_cached", f"the {found.tier.name} has lost blocks of it")
        if refusal is not None:
            self._table.refused[refusal.refusal or ""] += 1
            logger.warning("a hold of an earlier start is refused tokens=%d reason=%s", mark.tokens, refusal.reason)
            self._unsave(saved, found.tier)
            return
        self._table.restored += 1
        self._table.begin(hold)
        self._table.keep_in(hold, [found.tier])

    def _unsave(self, saved: SavedHold, tier: Tier) -> None:
        """Delete what an earlier start has written to disk about a hold. The store keeps it for other engines."""
        if tier.name == "disk":
            self._below.saved.drop(saved.client, saved.hashes[-1], [tier])
