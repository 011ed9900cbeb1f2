"""Decides which prompts stay cached for a time because their clients asked for it. Pure Python."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.core.features.kv_offloading import KVOffloading, NoOffloading
from engine.core.features.tiers.saved_holds import FoundHold
from engine.core.features.tiers.tier import Tier
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, State
from engine.wire.kv_offload import SavedHold
from engine.wire.messages import HoldEnd, HoldMark, HoldOutcome, HoldRefusal, HoldStats

logger = logging.getLogger(__name__)

MAX_HOLDS = 4096  # of all clients together
MAX_HOLDS_PER_CLIENT = 1024  # prefixes of one prompt share blocks, but each takes memory for the names of its blocks
RETRY_S = 1.0  # after which blocks that are in no tier are copied again
LASTING_S = 10.0  # that blocks wait on the device for a tier that survives a restart, if another tier has them
SAVE_S = 1.0  # between two writes of one hold, since each use changes its end
OFF = "this server keeps no holds (max_held_share is 0, or prefix caching is off)"


T = TypeVar("T", int, bytes, str)


class NoHolds:
    """Stand-in for Holds in an engine that keeps none: it refuses them all."""

    stats: HoldStats | None = None
    ends: Sequence[bytes] = ()

    def passed(self, request: Request, computed: int, now: float) -> None:
        asked = request.holds
        asked.outcomes += [refused(mark, "off", OFF) for mark in asked.take_marks(computed)]

    def used(self, request: Request, matched: int, now: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def release(self, name: str, client: str | None) -> None:
        pass

    def update(self, now: float) -> None:
        pass

    def clear(self) -> None:
        pass

    def check(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Hold:
    """A prefix that one client holds."""

    client: str
    name: str
    response_id: str
    request_id: str
    """Id of the request whose prompt it is."""
    hashes: list[bytes]
    """Of the first group's blocks; the last one identifies the prefix."""
    needed: list[list[bytes]]
    """Hashes of the blocks that are kept in each KV cache group."""
    blocks: list[list[int]]
    """These blocks on the device; empty lists once a tier keeps them instead."""
    ttl_s: float
    expires_at: float
    tiers: list[Tier] = field(default_factory=list)
    """Tiers that keep the blocks; empty if the device does."""
    ready_at: float | None = None
    """Time from which the blocks may move to the tiers."""
    stored_at: float | None = None
    """Time of the last command to copy the blocks to the tiers."""
    saved_at: float = float("-inf")
    """Time of the last write of the hold to lasting tiers."""
    is_live: bool = True

    @property
    def end(self) -> tuple[str, bytes]:
        return self.client, self.hashes[-1]

    @property
    def keys(self) -> list[tuple[int, bytes]]:
        return [(group, each) for group, hashes in enumerate(self.needed) for each in hashes]


class Holds:
    """Keeps prefixes in the prefix cache, or in a tier below it, until their time ends.

    A hold is granted or refused once its prompt is computed up to the mark; the outcome is sent with the first token.
    From then on its blocks cannot be evicted until its time ends, it is released, or the prefix cache is emptied. Its
    time starts anew whenever a request of the same client begins with the tokens of the hold.

    Holds of one client share their blocks. A new hold replaces earlier holds of the same client and name that are
    prefixes of it and would not last longer, so a growing conversation has one hold and not one for each turn.

    In each KV cache group, holds never pin more than a share of the blocks, and always leave enough for one request of
    the maximum length: with all other requests preempted, the first in order still gets its blocks.

    With tiers, holds get this share of each tier. The device keeps the blocks only until their request has ended and a
    tier has a copy of all of them. If each tier has lost a block, for instance because a file is damaged, the hold
    ends.

    On disk and in the store the hold itself is written too (SavedHolds), so that the next start restores it with its
    remaining time, if the blocks are still there.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        offloading: KVOffloading | NoOffloading | None = None,
        *,
        max_model_len: int,
        max_share: float,
        max_share_per_client: float,
        max_ttl_s: float,
    ):
        """max_share: fraction of each group's blocks, or of a tier, for all holds; max_share_per_client: for the holds
        of one client. max_ttl_s: longest time of a hold, in seconds."""
        self._kv_cache, self._below, self._max_ttl_s = kv_cache, offloading or NoOffloading(), max_ttl_s
        self._block_size = kv_cache.pool.block_size
        self._share, self._share_per_client = max_share, max_share_per_client
        self._room = [max(0, group.pool.num_blocks - group.least(max_model_len)) for group in kv_cache.groups]
        self._by_end: dict[tuple[str, bytes], Hold] = {}
        self._kept: list[Counter[bytes]] = [Counter() for _ in kv_cache.groups]  # hashes by group
        self._clients: dict[str, list[Counter[bytes]]] = {}  # the same by client
        self._num_of: Counter[str] = Counter()  # holds by client
        self._deadlines: list[tuple[float, int, Hold]] = []  # heap; a hold that was renewed is there with its old time
        self._to_move: dict[Hold, Request] = {}  # holds that tiers are to keep, with the requests that computed them
        self._to_save: set[Hold] = set()  # holds whose end has changed since they were written
        self._number = self._granted = self._restored = 0
        self._refused: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    @property
    def ends(self) -> Sequence[bytes]:
        """Hashes of the last blocks of all holds."""
        return [block_hash for _, block_hash in self._by_end]

    # -- granting ------------------------------------------------------------------------------------------

    def passed(self, request: Request, computed: int, now: float) -> None:
        """Grant or refuse the holds of a request whose marks are within its first `computed` tokens, which have been
        entered into the prefix cache."""
        for mark in request.holds.take_marks(computed):
            outcome = self._ask(request, mark, now)
            request.holds.outcomes.append(outcome)
            if outcome.refusal is None:
                self._granted += 1
                request.note(f"{outcome.tokens} tokens are held for {outcome.ttl_s:g} s")
            else:
                self._refused[outcome.refusal] += 1
                request.note(f"a hold of {outcome.tokens} tokens is refused: {outcome.reason}")

    def _ask(self, request: Request, mark: HoldMark, now: float) -> HoldOutcome:
        self.update(now)
        size = self._block_size
        if mark.ttl_s > self._max_ttl_s:
            return refused(mark, "ttl", f"its time of {mark.ttl_s:g} s is above max_hold_s ({self._max_ttl_s:g})")
        hashes = request.hashes(mark.tokens // size, size)
        if not hashes:
            return refused(mark, "short", f"its {mark.tokens} tokens are less than a block of {size}")
        hashes = hashes[: self._kv_cache.longest_prefix(hashes)]
        if not hashes:
            return refused(mark, "not_cached", "this engine has not kept all KV or state of these tokens")
        asked, expires_at = request.holds, now + mark.ttl_s
        if (same := self._by_end.get((asked.client, hashes[-1]))) is not None:
            if expires_at > same.expires_at:
                same.ttl_s, same.expires_at = mark.ttl_s, expires_at
            self._to_save.add(same)
            if same.name != asked.name:
                same.name = ""  # it is that of several conversations: none of them may end it
            if same.response_id != asked.response_id:
                same.response_id = ""
            return HoldOutcome(tokens=len(hashes) * size, ttl_s=same.ttl_s)
        needed = [list(group.needed(hashes)) for group in self._kv_cache.groups]
        blocks = [g.pool.match_all(some) for g, some in zip(self._kv_cache.groups, needed, strict=True)]
        hold = Hold(
            asked.client,
            asked.name,
            asked.response_id,
            request.request_id,
            hashes,
            needed,
            blocks,
            mark.ttl_s,
            expires_at,
        )
        replaced = [earlier for earlier in self._prefixes(asked.client, hashes) if self._replaces(hold, earlier)]
        if (refusal := self._lacks(mark, hold, replaced)) is not None:
            return refusal
        self._begin(hold)
        if self._below.tiers:
            self._to_move[hold] = request
        for earlier in replaced:
            self._end(earlier)
        return HoldOutcome(tokens=len(hashes) * size, ttl_s=mark.ttl_s)

    def _prefixes(self, client: str, hashes: Iterable[bytes]) -> list[Hold]:
        """Return the client's holds that are prefixes of this chain."""
        return [hold for each in hashes if (hold := self._by_end.get((client, each))) is not None]

    def _replaces(self, hold: Hold, earlier: Hold) -> bool:
        is_of_same_request = earlier.request_id == hold.request_id
        return earlier.name == hold.name and earlier.expires_at <= hold.expires_at and not is_of_same_request

    def _lacks(self, mark: HoldMark, hold: Hold, replaced: list[Hold]) -> HoldOutcome | None:
        """Return the refusal of a hold for which there is no room, else None."""
        number = self._num_of[hold.client] - len(replaced)
        if number >= MAX_HOLDS_PER_CLIENT:
            return refused(mark, "client_full", f"this client has {number} holds, the limit is {MAX_HOLDS_PER_CLIENT}")
        if (number := len(self._by_end) - len(replaced)) >= MAX_HOLDS:
            return refused(mark, "full", f"all clients together have {number} holds, the limit is {MAX_HOLDS}")
        own = self._clients.get(hold.client) or [Counter() for _ in hold.needed]
        for kept, share, whose, refusal in (
            (self._kept, self._share, "all holds", "full"),
            (own, self._share_per_client, "this client's holds", "client_full"),
        ):
            counts = [
                len(kept[group]) + _growth(kept[group], new, [h for each in replaced for h in each.needed[group]])
                for group, new in enumerate(hold.needed)
            ]
            if (tiers := self._below.tiers) and not any(tier.fits(counts, min(share, self._share)) for tier in tiers):
                reason = f"{whose} would keep {counts[0]} blocks, more than {share:.0%} of any tier"
                return refused(mark, refusal, reason)  # type: ignore[arg-type]
            for count, limit, group in zip(counts, self._limits(share), self._kv_cache.groups, strict=True):
                if count > limit and not tiers:
                    what = "snapshots" if group.kind == "mamba" else "blocks"
                    reason = f"{whose} would keep {count} {what}, the limit is {limit}"
                    return refused(mark, refusal, reason)  # type: ignore[arg-type]
        for group, blocks, room in zip(self._kv_cache.groups, hold.blocks, self._limits(self._share), strict=True):
            count = len(group.pool.held) + _growth(group.pool.held, blocks, [])
            if tiers and count > room:
                reason = f"{count} blocks would wait on the device to be copied to a tier, the limit is {room}"
                return refused(mark, "full", reason)
        return None

    def _limits(self, share: float) -> list[int]:
        """Return how many blocks of each group on the device this share allows holds to keep."""
        share = min(share, self._share)
        return [
            min(room, int(share * group.pool.num_blocks))
            for room, group in zip(self._room, self._kv_cache.groups, strict=True)
        ]

    def _begin(self, hold: Hold) -> None:
        own = self._clients.setdefault(hold.client, [Counter() for _ in hold.needed])
        for group, manager in enumerate(self._kv_cache.groups):
            manager.pool.hold(hold.blocks[group])
            self._kept[group].update(hold.needed[group])
            own[group].update(hold.needed[group])
        self._by_end[hold.end] = hold
        self._num_of[hold.client] += 1
        self._push(hold)

    def _push(self, hold: Hold) -> None:
        self._number += 1
        heapq.heappush(self._deadlines, (hold.expires_at, self._number, hold))

    # -- using ---------------------------------------------------------------------------------------------

    def used(self, request: Request, matched: int, now: float) -> None:
        """Renew the holds that a request has read: those of its client within its first `matched` blocks, which were
        cached."""
        if self._by_end and matched:
            self.update(now)
            for hold in self._prefixes(request.holds.client, request.hashes(matched, self._block_size)):
                hold.expires_at = max(hold.expires_at, now + hold.ttl_s)
                self._to_save.add(hold)

    # -- restoring -----------------------------------------------------------------------------------------

    def _restore(self, found: FoundHold, now: float) -> None:
        """Grant or refuse a hold that an earlier start has written. If this engine has the hold already, only renew
        it."""
        saved, ends_at = found.hold, now + min(found.left_s, self._max_ttl_s)
        if (same := self._by_end.get((saved.client, saved.hashes[-1]))) is not None:
            if ends_at > same.expires_at:
                same.ttl_s, same.expires_at = saved.ttl_s, ends_at
            if same.tiers and found.tier not in same.tiers and self._below.has(found.tier, same.keys):
                self._keep_in(same, [found.tier])
            return
        if not found.is_new:
            return
        if found.left_s <= 0:
            self._ended["expired"] += 1
            self._unsave(saved, found.tier)
            return
        groups = len(self._kv_cache.groups)
        hold = Hold(
            saved.client,
            saved.name,
            saved.response_id,
            "",
            saved.hashes,
            saved.needed,
            [[] for _ in range(groups)],
            saved.ttl_s,
            ends_at,
        )
        mark = HoldMark(len(saved.hashes) * self._block_size, saved.ttl_s)
        if len(saved.needed) != groups or not self._below.has(found.tier, hold.keys):
            refusal: HoldOutcome | None = refused(mark, "not_cached", f"the {found.tier.name} has lost blocks of it")
        else:
            refusal = self._lacks(mark, hold, [])
        if refusal is not None:
            self._refused[refusal.refusal or ""] += 1
            logger.warning("a hold of an earlier start is refused tokens=%d reason=%s", mark.tokens, refusal.reason)
            self._unsave(saved, found.tier)
            return
        self._restored += 1
        self._keep_in(hold, [found.tier])
        self._begin(hold)

    def _unsave(self, saved: SavedHold, tier: Tier) -> None:
        """Delete what an earlier start has written to disk about a hold. The store keeps it for other engines."""
        if tier.name == "disk":
            self._below.saved.drop(saved.client, saved.hashes[-1], [tier])

    # -- moving down, and ending ---------------------------------------------------------------------------

    def update(self, now: float) -> None:
        """End the holds whose time is over, restore those of an earlier start, and move holds to tiers that have a copy
        of their blocks."""
        for found in self._below.saved.take_found(now):
            self._restore(found, now)
        for dropped in self._below.saved.take_dropped():  # by the engine that serves the conversation now
            hold = self._by_end.get((dropped.client, dropped.hashes[-1]))
            if hold is not None and not hold.request_id:
                self._end(hold)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, hold = heapq.heappop(self._deadlines)
            if not hold.is_live:
                continue
            if hold.expires_at > now:
                self._push(hold)  # it was renewed
            else:
                self._end(hold, "expired")
        for hold, request in list(self._to_move.items()):
            if request.state is State.FINISHED:  # before, its blocks may turn out to hold non-finite numbers
                self._move(hold, now)
        for tier in self._below.tiers:
            if any(index.lost_held for index in tier.indexes):
                self._look_for_losses(tier)
        for hold in [hold for hold in self._to_save if now >= hold.saved_at + SAVE_S]:
            self._save(hold, now)

    def _move(self, hold: Hold, now: float) -> None:
        """Move a hold to the tiers with its blocks and room. Waits LASTING_S for tiers that survive restarts."""
        hold.ready_at = now if hold.ready_at is None else hold.ready_at
        counts = [len(kept) for kept in self._kept]
        tiers = [tier for tier in self._below.tiers if tier.fits(counts, self._share)]
        there = [tier for tier in tiers if self._below.has(tier, hold.keys)]
        awaited = [tier for tier in self._below.saved.lasting(tiers) if not tier.rests and tier not in there]
        if there and (not awaited or now >= hold.ready_at + LASTING_S):
            self._unpin(hold)
            del self._to_move[hold]
            self._keep_in(hold, there)
            self._save(hold, now)
        elif hold.stored_at is None or now >= hold.stored_at + RETRY_S:
            hold.stored_at = now
            self._below.store(hold.keys)

    def _keep_in(self, hold: Hold, tiers: list[Tier]) -> None:
        hold.tiers += tiers
        for tier in tiers:
            self._below.hold(tier, hold.keys)

    def _save(self, hold: Hold, now: float) -> None:
        """Write a hold to its tiers that survive a restart."""
        self._to_save.discard(hold)
        hold.saved_at = now
        saved = SavedHold(
            hold.client, hold.name, hold.response_id, hold.hashes, hold.needed, hold.ttl_s, hold.expires_at
        )
        self._below.saved.save(saved, self._below.saved.lasting(hold.tiers), now)

    def _look_for_losses(self, tier: Tier) -> None:
        """After this tier has lost held blocks, end the holds whose blocks are no longer complete in any tier."""
        for index in tier.indexes:
            index.lost_held = False
        self._below.saved.lost()
        for hold in [hold for hold in self._by_end.values() if tier in hold.tiers]:
            if self._below.holds(tier, hold.keys):
                continue
            self._below.unhold(tier, hold.keys)
            hold.tiers.remove(tier)
            self._below.saved.drop(*hold.end, self._below.saved.lasting([tier]))
            if not hold.tiers:
                self._end(hold, "lost")

    def _unpin(self, hold: Hold) -> None:
        for manager, blocks in zip(self._kv_cache.groups, hold.blocks, strict=True):
            manager.pool.unhold(blocks)
        hold.blocks = [[] for _ in hold.blocks]

    def release(self, name: str, client: str | None) -> None:
        """End the holds that have this name, or are of the response with this id, and delete their blocks from the
        tiers. client: None for all clients."""
        deleted = self._below.saved.release(name, client)
        for hold in [hold for hold in self._by_end.values() if client in (None, hold.client)]:
            if name in (hold.name, hold.response_id):
                self._end(hold, "released")
                deleted += hold.keys
        self._below.delete(deleted)

    def forget(self, request: Request) -> None:
        """End the holds that share blocks with a request, since these may hold non-finite numbers."""
        known = min(request.computed, len(request.tokens)) // self._block_size
        hashes = set(request.hashes(known, self._block_size))
        for hold in [hold for hold in self._by_end.values() if not hashes.isdisjoint(hold.hashes)]:
            self._end(hold, "invalid")

    def clear(self) -> None:
        """End all holds, because the prefix cache is emptied."""
        for hold in list(self._by_end.values()):
            self._end(hold, "cleared")

    def _end(self, hold: Hold, why: HoldEnd | None = None) -> None:
        """End a hold. why: None if another hold replaces it."""
        hold.is_live = False
        del self._by_end[hold.end]
        self._to_move.pop(hold, None)
        self._to_save.discard(hold)
        self._unpin(hold)
        for tier in hold.tiers:
            self._below.unhold(tier, hold.keys)
        # another engine may have renewed an expired hold in the store, which is deleted there some time later
        written = [t for t in self._below.saved.lasting(hold.tiers) if why != "expired" or t.name != "store"]
        self._below.saved.drop(*hold.end, written)
        own = self._clients[hold.client]
        for group, hashes in enumerate(hold.needed):
            drop(self._kept[group], hashes)
            drop(own[group], hashes)
        drop(self._num_of, [hold.client])
        if hold.client not in self._num_of:
            del self._clients[hold.client]
        if why is not None:
            self._ended[why] += 1

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def stats(self) -> HoldStats:
        return HoldStats(
            holds=len(self._by_end),
            clients=len(self._clients),
            blocks=len(self._kept[0]),
            device_blocks=len(self._kv_cache.pool.held),
            max_blocks=None if self._below.tiers else self._limits(self._share)[0],
            granted=self._granted,
            restored=self._restored,
            refused=dict(self._refused),
            ended=dict(self._ended),
        )

    def check(self) -> None:
        """Raise AssertionError if a hold lacks blocks, or if a limit is exceeded."""
        holds = list(self._by_end.values())
        for group, manager in enumerate(self._kv_cache.groups):
            pool = manager.pool
            assert pool.held == Counter(b for hold in holds for b in hold.blocks[group]), "a held block is lost"
            assert len(pool.held) <= self._limits(self._share)[group], "too many blocks are held"
            assert self._kept[group] == Counter(h for hold in holds for h in hold.needed[group]), "a hold is lost"
            for client, counters in self._clients.items():
                own = Counter(h for hold in holds if hold.client == client for h in hold.needed[group])
                assert counters[group] == own, "a client's hold is lost"
                assert self._below.tiers or len(own) <= self._limits(self._share_per_client)[group], "a client has more"
            assert self._below.tiers or len(self._kept[group]) <= self._limits(self._share)[group], "too much is held"
        for hold in holds:
            if not hold.tiers:
                assert self._kv_cache.longest_prefix(hold.hashes) == len(hold.hashes), "a held block was evicted"
            for tier in hold.tiers:
                has_lost = any(index.lost_held for index in tier.indexes)
                assert has_lost or self._below.holds(tier, hold.keys), "a tier has evicted a held block"
        assert Counter(hold.client for hold in holds) == self._num_of, "a hold of a client is lost"
        assert self._clients.keys() == self._num_of.keys(), "a client is lost"
        pending = {hold for _, _, hold in self._deadlines}
        assert all(hold in pending and hold.is_live for hold in holds), "a hold would never end"
        assert all(hold.is_live and not hold.tiers for hold in self._to_move), "an ended hold would move"


def refused(mark: HoldMark, refusal: HoldRefusal, reason: str) -> HoldOutcome:
    return HoldOutcome(tokens=mark.tokens, ttl_s=mark.ttl_s, refusal=refusal, reason=reason)


def _growth(kept: Counter[T], new: list[T], old: list[T]) -> int:
    """Return how many more blocks are kept after taking references to `new` blocks and then giving up those to
    `old`."""
    taken = set(new)
    gone = sum(kept[block] == count and block not in taken for block, count in Counter(old).items())
    return sum(block not in kept for block in taken) - gone


def drop(counter: Counter[T], items: Iterable[T]) -> None:
    """Subtract one from the count of each item, and remove items that reach zero."""
    for item in items:
        counter[item] -= 1
        if not counter[item]:
            del counter[item]
