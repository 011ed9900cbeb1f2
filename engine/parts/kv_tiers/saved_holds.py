"""Holds that outlive their engine: the records written beside their blocks. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.parts.kv_tiers.tier import Tier
from engine.wire.parts.kv_offload import DropHold, SavedHold, SaveHold, StoreListing, TierCommand

GROUP = 0xFFFF  # stands for a KV cache group in the name of a hold; no group has this number
PERIOD_S = 1.0  # between two looks at the ends of holds
EXPIRED_S = 60.0  # after its end, after which a hold in the store is deleted: by then all engines know of a renewal


@dataclass(frozen=True, slots=True)
class FoundHold:
    """A hold that another engine, or an earlier start of this one, has written."""

    tier: Tier
    hold: SavedHold
    left_s: float
    """Seconds until its end; negative after it."""
    is_new: bool
    """Whether it was there when this engine started; otherwise another engine serves it."""


@dataclass(slots=True, eq=False)
class Kept:
    """A hold in the store. No engine may evict its blocks from the store, whichever engine has granted it."""

    hold: SavedHold
    kept: set[bytes]
    """Names of its blocks that the index keeps."""
    missing: set[bytes]
    """Names of its blocks that have not been listed."""


class SavedHolds:
    """Writes holds to the disk and the store, and reports those that are found there.

    The disk belongs to one engine, and so do the holds on it. Holds in the store belong to all engines: each of them
    keeps their blocks in its index until the hold is deleted, or its time is over. Times are seconds since the epoch,
    so machines that share a store need synchronized clocks.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        name_of: Callable[[int, bytes], bytes],
        submit: Callable[[TierCommand], None],
        epoch_s: float,
    ):
        """submit: sends a command to the ranks. epoch_s: seconds since the epoch when `now` was 0."""
        self._tiers, self.name_of, self._submit, self._epoch_s = tiers, name_of, submit, epoch_s
        self._found: list[tuple[Tier, SavedHold, bool]] = []
        self._in_store: dict[bytes, Kept] = {}
        self._dropped: list[SavedHold] = []
        self._listed, self._look_at = False, 0.0

    # -- holds of this engine ------------------------------------------------------------------------------

    def lasting(self, tiers: Sequence[Tier]) -> list[Tier]:
        """Return those of these tiers in which holds survive a restart."""
        return [tier for tier in tiers if tier.name != "host"]

    def save(self, hold: SavedHold, tiers: Sequence[Tier], now: float) -> None:
        """Write a hold, or its new end. `ends_at` of the hold is on the same clock as `now`."""
        saved = SavedHold(hold.client, hold.name, hold.response_id, hold.hashes, hold.needed, hold.ttl_s,
                          hold.ends_at + self._epoch_s)  # fmt: skip
        for tier in tiers:
            self._submit(SaveHold(self._name(hold.client, hold.hashes[-1]), saved, tier.name == "store"))

    def drop(self, client: str, end: bytes, tiers: Sequence[Tier]) -> None:
        """Delete the record of a client's hold. end: hash of the hold's last block."""
        for tier in tiers:
            self._drop(self._name(client, end), tier.name == "store")

    def release(self, name: str, client: str | None) -> list[tuple[int, bytes]]:
        """Delete the holds of other engines in the store that have this name or response id. Returns the blocks that
        they have kept, by group and hash. client: None for all clients."""
        keys = []
        for lease, kept in list(self._in_store.items()):
            if name in (kept.hold.name, kept.hold.response_id) and client in (None, kept.hold.client):
                self._drop(lease, in_store=True)
                keys += [(group, each) for group, hashes in enumerate(kept.hold.needed) for each in hashes]
        return keys

    def _drop(self, lease: bytes, in_store: bool) -> None:
        self._submit(DropHold(lease, in_store))
        if in_store:
            self._forget(lease)

    # -- holds of others -----------------------------------------------------------------------------------

    def restore(self, hold: SavedHold) -> None:
        """Note a hold that an earlier start has left on disk."""
        self._found.append((self._named("disk"), hold, True))

    def take_found(self, now: float) -> list[FoundHold]:
        """Return the holds that were found or have changed since the last call."""
        found, self._found = self._found, []
        return [FoundHold(tier, hold, self._left_s(hold, now), is_new) for tier, hold, is_new in found]

    def take_dropped(self) -> list[SavedHold]:
        """Return the holds that other engines have deleted from the store since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def listed(self, listing: StoreListing) -> None:
        """Record which holds the store has gained and lost. Call it before the blocks of the listing are entered, so
        that none of them is evicted to make room for another."""
        store = self._named("store")
        for lease in listing.dropped_holds:
            if lease in self._in_store:
                self._dropped.append(self._in_store[lease].hold)
                self._forget(lease)
        there = {block.name for block in listing.added}
        for kept in self._in_store.values():
            self._keep(kept, kept.missing & there)
        for lease, hold in listing.holds:
            self._forget(lease)
            names = {self.name_of(group, each) for group, hashes in enumerate(hold.needed) for each in hashes}
            self._in_store[lease] = kept = Kept(hold, set(), names)
            self._keep(kept, {name for name in names if name in there or store.index(0).has(name)})
            self._found.append((store, hold, not self._listed))
        self._listed = True

    def entered(self, listing: StoreListing) -> None:
        """Record that the blocks of a listing have been entered, as far as there was room."""
        index = self._named("store").index(0)
        lacking = {block.name for block in listing.added if not index.knows(block.name)}
        for kept in self._in_store.values() if lacking else ():
            for name in kept.kept & lacking:
                index.unhold(name)
                kept.kept.remove(name)
                kept.missing.add(name)

    def lost(self) -> None:
        """Record that the index of the store has removed blocks which were kept."""
        held = self._named("store").index(0).held if self._in_store else {}
        for kept in self._in_store.values():
            lost = {name for name in kept.kept if name not in held}
            kept.kept -= lost
            kept.missing |= lost

    def clear(self) -> None:
        """Delete all holds in the store."""
        for lease in list(self._in_store):
            self._drop(lease, in_store=True)

    def expire(self, now: float) -> None:
        """Delete the holds of the store whose time is over."""
        if now >= self._look_at:
            self._look_at = now + PERIOD_S
            for lease in [name for name, kept in self._in_store.items() if self._left_s(kept.hold, now) < -EXPIRED_S]:
                self._drop(lease, in_store=True)

    def _keep(self, kept: Kept, names: set[bytes]) -> None:
        for name in names:
            self._named("store").index(0).hold(name)
        kept.kept |= names
        kept.missing -= names

    def _forget(self, lease: bytes) -> None:
        if kept := self._in_store.pop(lease, None):
            for name in kept.kept:
                self._named("store").index(0).unhold(name)

    def _left_s(self, hold: SavedHold, now: float) -> float:
        return hold.ends_at - self._epoch_s - now

    def _name(self, client: str, end: bytes) -> bytes:
        return self.name_of(GROUP, client.encode() + end)

    def _named(self, name: str) -> Tier:
        return next(tier for tier in self._tiers if tier.name == name)
