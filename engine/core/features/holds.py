"""Decides which prompts stay cached for a time because their clients asked for it. Pure Python."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.wire.messages import HoldEnd, HoldMark, HoldOutcome, HoldRefusal, HoldStats

OFF = "this server keeps no holds (max_held_share is 0, or prefix caching is off)"


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

    def expire(self, now: float) -> None:
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
    """Request whose prompt it is."""
    hashes: list[bytes]
    """Of the first group's blocks; the last one identifies the prefix."""
    blocks: list[list[int]]
    """What is pinned in each KV cache group."""
    ttl_s: float
    expires_at: float
    is_live: bool = True

    @property
    def end(self) -> tuple[str, bytes]:
        return self.client, self.hashes[-1]


class Holds:
    """Pins prefixes in the prefix cache until their time ends.

    A hold is granted once its prompt is computed up to the mark, or refused then; the first token brings the answer.
    From then on its blocks cannot be evicted until its time ends, it is released, or the prefix cache is emptied. Its
    time starts anew whenever a request of the same client begins with all of its tokens.

    Holds of one client share their blocks. A new hold replaces earlier holds of the same client and name that are
    prefixes of it and would not last longer, so a growing conversation has one hold and not one for each turn.

    In each KV cache group, holds never pin more than a share of the blocks, and always leave enough for one request of
    the maximum length: with all other requests preempted, the first in order still gets its blocks.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        max_share: float,
        max_share_per_client: float,
        max_ttl_s: float,
    ):
        """max_share: fraction of each group's blocks for all holds; max_share_per_client: for those of one client.
        max_ttl_s: longest time of a hold, in seconds."""
        self._kv_cache, self._max_ttl_s = kv_cache, max_ttl_s
        self._block_size = kv_cache.pool.block_size
        self._limits = [
            max(0, min(int(max_share * group.pool.num_blocks), group.pool.num_blocks - group.least(max_model_len)))
            for group in kv_cache.groups
        ]
        self._client_limits = [
            min(limit, int(max_share_per_client * group.pool.num_blocks))
            for limit, group in zip(self._limits, kv_cache.groups, strict=True)
        ]
        self._by_end: dict[tuple[str, bytes], Hold] = {}
        self._clients: dict[str, list[Counter[int]]] = {}  # blocks by client and group
        self._deadlines: list[tuple[float, int, Hold]] = []  # heap; a hold that was renewed is there with its old time
        self._number = self._granted = 0
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
        self.expire(now)
        size = self._block_size
        if mark.ttl_s > self._max_ttl_s:
            return refused(mark, "ttl", f"its time of {mark.ttl_s:g} s is above max_hold_s ({self._max_ttl_s:g})")
        hashes = request.hashes(mark.tokens // size, size)
        if not hashes:
            return refused(mark, "short", f"its {mark.tokens} tokens are less than a block of {size}")
        hashes = hashes[: self._kv_cache.longest_prefix(hashes)]
        if not hashes:
            return refused(mark, "not_cached", "this engine does not keep what its first tokens need")
        asked, expires_at = request.holds, now + mark.ttl_s
        if (same := self._by_end.get((asked.client, hashes[-1]))) is not None:
            if expires_at > same.expires_at:
                same.ttl_s, same.expires_at = mark.ttl_s, expires_at
                self._push(same)
            return HoldOutcome(tokens=len(hashes) * size, ttl_s=same.ttl_s)
        groups = self._kv_cache.groups
        blocks = [group.pool.match_all(group.needed(hashes)) for group in groups]
        hold = Hold(
            asked.client, asked.name, asked.response_id, request.request_id, hashes, blocks, mark.ttl_s, expires_at
        )
        replaced = [earlier for earlier in self._prefixes(asked.client, hashes) if self._replaces(hold, earlier)]
        if (refusal := self._lacks(mark, hold, replaced)) is not None:
            return refusal
        self._begin(hold)
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
        for group, manager in enumerate(self._kv_cache.groups):
            new, old = hold.blocks[group], [block for earlier in replaced for block in earlier.blocks[group]]
            own = self._clients[hold.client][group] if hold.client in self._clients else Counter[int]()
            for kept, limit, whose, refusal in (
                (manager.pool.held, self._limits[group], "all holds", "full"),
                (own, self._client_limits[group], "this client's holds", "client_full"),
            ):
                needed = len(kept) + _growth(kept, new, old)
                if needed > limit:
                    what = "snapshots" if manager.kind == "mamba" else "blocks"
                    reason = f"{whose} would keep {needed} {what}, the limit is {limit}"
                    return refused(mark, refusal, reason)  # type: ignore[arg-type]
        return None

    def _begin(self, hold: Hold) -> None:
        counters = self._clients.setdefault(hold.client, [Counter() for _ in hold.blocks])
        for manager, blocks, counter in zip(self._kv_cache.groups, hold.blocks, counters, strict=True):
            manager.pool.hold(blocks)
            counter.update(blocks)
        self._by_end[hold.end] = hold
        self._push(hold)

    def _push(self, hold: Hold) -> None:
        self._number += 1
        heapq.heappush(self._deadlines, (hold.expires_at, self._number, hold))

    # -- using ---------------------------------------------------------------------------------------------

    def used(self, request: Request, matched: int, now: float) -> None:
        """Renew the holds that a request has read: those of its client within its first `matched` blocks, which were
        cached."""
        if self._by_end and matched:
            self.expire(now)
            for hold in self._prefixes(request.holds.client, request.hashes(matched, self._block_size)):
                hold.expires_at = max(hold.expires_at, now + hold.ttl_s)

    # -- ending --------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End the holds whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, hold = heapq.heappop(self._deadlines)
            if not hold.is_live:
                continue
            if hold.expires_at > now:
                self._push(hold)  # it was renewed
            else:
                self._end(hold, "expired")

    def release(self, name: str, client: str | None) -> None:
        """End the holds that have this name, or are of the response with this id. client: None for all clients."""
        for hold in [hold for hold in self._by_end.values() if client in (None, hold.client)]:
            if name in (hold.name, hold.response_id):
                self._end(hold, "released")

    def forget(self, request: Request) -> None:
        """End the holds whose blocks a request has computed, since they may hold non-finite numbers."""
        hashes = request.hashes(min(request.computed, len(request.tokens)) // self._block_size, self._block_size)
        computed = set(hashes[request.prefix.num_cached // self._block_size :])
        for hold in [hold for hold in self._by_end.values() if not computed.isdisjoint(hold.hashes)]:
            self._end(hold, "invalid")

    def clear(self) -> None:
        """End all holds, because the prefix cache is emptied."""
        for hold in list(self._by_end.values()):
            self._end(hold, "cleared")

    def _end(self, hold: Hold, why: HoldEnd | None = None) -> None:
        """End a hold. why: None if another hold replaces it."""
        hold.is_live = False
        del self._by_end[hold.end]
        counters = self._clients[hold.client]
        for manager, blocks, counter in zip(self._kv_cache.groups, hold.blocks, counters, strict=True):
            manager.pool.unhold(blocks)
            drop(counter, blocks)
        if not any(counters):
            del self._clients[hold.client]
        if why is not None:
            self._ended[why] += 1

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def stats(self) -> HoldStats:
        held = [(len(group.pool.held), limit) for group, limit in zip(self._kv_cache.groups, self._limits, strict=True)]
        blocks, limit = max(held, key=lambda each: each[0] / max(1, each[1]))
        return HoldStats(
            holds=len(self._by_end),
            clients=len(self._clients),
            blocks=blocks,
            max_blocks=limit,
            granted=self._granted,
            refused=dict(self._refused),
            ended=dict(self._ended),
        )

    def check(self) -> None:
        """Raise AssertionError unless every hold has its blocks, and no limit is exceeded."""
        holds = list(self._by_end.values())
        for group, manager in enumerate(self._kv_cache.groups):
            pool = manager.pool
            assert pool.held == Counter(b for hold in holds for b in hold.blocks[group]), "a held block is lost"
            assert len(pool.held) <= self._limits[group], "too many blocks are held"
            for client, counters in self._clients.items():
                own = Counter(b for hold in holds if hold.client == client for b in hold.blocks[group])
                assert counters[group] == own and len(own) <= self._client_limits[group], "a client's blocks are lost"
        for hold in holds:
            assert self._kv_cache.longest_prefix(hold.hashes) == len(hold.hashes), "a held block was evicted"
        assert {hold.client for hold in holds} == self._clients.keys(), "a client is lost"
        pending = {hold for _, _, hold in self._deadlines}
        assert all(hold in pending and hold.is_live for hold in holds), "a hold would never end"


def refused(mark: HoldMark, refusal: HoldRefusal, reason: str) -> HoldOutcome:
    return HoldOutcome(tokens=mark.tokens, ttl_s=mark.ttl_s, refusal=refusal, reason=reason)


def _growth(kept: Counter[int], new: list[int], old: list[int]) -> int:
    """Return how many more blocks are kept after taking references to `new` blocks and then giving up those to
    `old`."""
    taken = set(new)
    gone = sum(kept[block] == count and block not in taken for block, count in Counter(old).items())
    return sum(block not in kept for block in taken) - gone


def drop(counter: Counter[int], blocks: Iterable[int]) -> None:
    """Take one of each block from a counter, and remove blocks that reach zero."""
    for block in blocks:
        counter[block] -= 1
        if not counter[block]:
            del counter[block]
