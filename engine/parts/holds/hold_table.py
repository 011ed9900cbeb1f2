"""The holds of an engine, what they keep, and how much they may keep. Pure Python."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.core.kv_cache_manager import KVCacheManager
from engine.costs.block_usage import BlockUsage
from engine.costs.request_cost import BlockAccount, RequestCost, cost_of
from engine.parts.kv_tiers.prefix_pins import longest_prefix, pin, unpin
from engine.parts.kv_tiers.tier import Tier
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.cache_writes import HoldOutcome, HoldRefusal
from engine.wire.parts.holds import HoldEnd, HoldMark, HoldStats

MAX_HOLDS = 4096  # of all clients together
MAX_HOLDS_PER_CLIENT = 1024  # prefixes of one prompt share blocks, but each takes memory for the names of its blocks

T = TypeVar("T", int, bytes, str)


@dataclass(frozen=True, slots=True)
class PromptOfHold:
    """The tokens of a hold, and what else its KV depends on."""

    tokens: array[int]
    cache_salt: str
    adapter: ModelAdapter | None


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
    prompt: PromptOfHold | None = None
    """What another engine needs to compute the blocks; None if it contains images."""
    was_given: bool = False
    """Whether another engine has been asked to hold the prompt as well, since it was used last."""
    tiers: list[Tier] = field(default_factory=list)
    """Tiers that keep the blocks; empty if the device does."""
    stored_at: float | None = None
    """Time of the last command to copy the blocks to the tiers."""
    is_live: bool = True
    of: dict[str, Any] = field(default_factory=dict)
    """As Request.of."""

    @property
    def cost(self) -> RequestCost:
        """What its blocks, on the device and in tiers, have cost since a request last paid for them."""
        return cost_of(self)

    @property
    def end(self) -> tuple[str, bytes]:
        return self.client, self.hashes[-1]

    @property
    def keys(self) -> list[tuple[int, bytes]]:
        return [(group, each) for group, hashes in enumerate(self.needed) for each in hashes]

    def renew(self, ttl_s: float, expires_at: float) -> None:
        """Let the hold last until `expires_at`, with this time, unless it lasts longer already."""
        if expires_at > self.expires_at:
            self.ttl_s, self.expires_at, self.was_given = ttl_s, expires_at, False


class HoldTable:
    """All live holds of an engine. Their blocks are pinned on the device, or kept in tiers.

    In each KV cache group, holds never pin more than a share of the blocks, and always leave enough for one request of
    the maximum length: with all other requests preempted, the first in order still gets its blocks. With tiers, holds
    get this share of each tier.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        tiers: Sequence[Tier],
        usages: Sequence[BlockUsage],
        *,
        max_model_len: int,
        max_share: float,
        max_share_per_client: float,
    ):
        """usages, max_share, max_share_per_client: as for Holds."""
        self._kv_cache, self._tiers, self._usages = kv_cache, tiers, usages
        self._share, self._share_per_client = max_share, max_share_per_client
        self._room = [max(0, group.pool.num_blocks - group.least(max_model_len)) for group in kv_cache.groups]
        #: Live holds by their ends.
        self.by_end: dict[tuple[str, bytes], Hold] = {}
        #: Pins on the device, by KV cache group and block.
        self.pinned: list[Counter[int]] = [Counter() for _ in kv_cache.groups]
        self._kept: list[Counter[bytes]] = [Counter() for _ in kv_cache.groups]  # hashes by group
        self._clients: dict[str, list[Counter[bytes]]] = {}  # the same by client
        self._num_of: Counter[str] = Counter()  # holds by client
        self._deadlines: list[tuple[float, int, Hold]] = []  # heap; a hold that was renewed is there with its old time
        #: What holds have cost that ended without another request.
        self.unused = RequestCost()
        self._number = self.granted = 0
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def prefixes(self, client: str, hashes: Iterable[bytes]) -> list[Hold]:
        """Return the client's holds that are prefixes of this chain."""
        return [hold for each in hashes if (hold := self.by_end.get((client, each))) is not None]

    # -- limits --------------------------------------------------------------------------------------------

    def lacks(self, mark: HoldMark, hold: Hold, replaced: Sequence[Hold] = ()) -> HoldOutcome | None:
        """Return the refusal of a hold for which there is no room, else None. replaced: holds that end if it begins."""
        number = self._num_of[hold.client] - len(replaced)
        if number >= MAX_HOLDS_PER_CLIENT:
            return refused(mark, "client_full", f"this client has {number} holds, the limit is {MAX_HOLDS_PER_CLIENT}")
        if (number := len(self.by_end) - len(replaced)) >= MAX_HOLDS:
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
            if self._tiers and not any(tier.fits(counts, min(share, self._share)) for tier in self._tiers):
                reason = f"{whose} would keep {counts[0]} blocks, more than {share:.0%} of any tier"
                return refused(mark, refusal, reason)  # type: ignore[arg-type]
            for count, limit, group in zip(counts, self._limits(share), self._kv_cache.groups, strict=True):
                if count > limit and not self._tiers:
                    what = "snapshots" if group.kind == "mamba" else "blocks"
                    reason = f"{whose} would keep {count} {what}, the limit is {limit}"
                    return refused(mark, refusal, reason)  # type: ignore[arg-type]
        for pinned, blocks, room in zip(self.pinned, hold.blocks, self._limits(self._share), strict=True):
            count = len(pinned) + _growth(pinned, blocks, [])
            if self._tiers and count > room:
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

    def roomy_tiers(self) -> list[Tier]:
        """Return the tiers that have room for all holds."""
        counts = [len(kept) for kept in self._kept]
        return [tier for tier in self._tiers if tier.fits(counts, self._share)]

    # -- beginning and ending ------------------------------------------------------------------------------

    def begin(self, hold: Hold) -> None:
        """Add a hold, and pin its blocks on the device."""
        own = self._clients.setdefault(hold.client, [Counter() for _ in hold.needed])
        for group, manager in enumerate(self._kv_cache.groups):
            pin(manager.pool, hold.blocks[group], holder=hold)
            self.pinned[group].update(hold.blocks[group])
            self._kept[group].update(hold.needed[group])
            own[group].update(hold.needed[group])
        self.by_end[hold.end] = hold
        self._num_of[hold.client] += 1
        self._push(hold)

    def keep_in(self, hold: Hold, tiers: list[Tier]) -> None:
        """Keep the blocks of a hold in tiers that have them, and no longer on the device."""
        self._unpin(hold)
        hold.tiers += tiers
        for tier in tiers:
            tier.hold(hold.keys, hold.cost.tiers[tier.name])

    def leave(self, hold: Hold, tier: Tier) -> None:
        """Keep the blocks of a hold no longer in a tier."""
        hold.tiers.remove(tier)
        tier.unhold(hold.keys, hold.cost.tiers[tier.name])

    def pay(self, hold: Hold, cost: RequestCost) -> None:
        """Charge a request with what the blocks of a live hold have cost since a request last paid for them."""
        for group, usage in enumerate(self._usages):
            account = hold.cost.blocks[group]
            charge(cost.blocks[group], account, usage.block_time(account, hold.blocks[group]))
        for tier in hold.tiers:
            account = hold.cost.tiers[tier.name]
            charge(cost.tiers[tier.name], account, tier.byte_time(hold.keys, account))

    def end(self, hold: Hold, why: HoldEnd | None, cost: RequestCost | None = None) -> None:
        """Remove a hold; its blocks may be evicted from now on. why: None if another hold replaces it. cost: of the
        request that pays for the hold, if there is one."""
        hold.is_live = False
        del self.by_end[hold.end]
        self._unpin(hold)
        for tier in hold.tiers:
            tier.unhold(hold.keys, hold.cost.tiers[tier.name])
        payer = cost or self.unused
        for group, account in hold.cost.blocks.items():
            charge(payer.blocks[group], account, account.block_ns)
        for name, account in hold.cost.tiers.items():
            charge(payer.tiers[name], account, account.block_ns)
        own = self._clients[hold.client]
        for group, hashes in enumerate(hold.needed):
            drop(self._kept[group], hashes)
            drop(own[group], hashes)
        drop(self._num_of, [hold.client])
        if hold.client not in self._num_of:
            del self._clients[hold.client]
        if why is not None:
            self.ended[why] += 1

    def overdue(self, now: float) -> Iterable[Hold]:
        """Yield the holds whose time is over. The caller ends them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, hold = heapq.heappop(self._deadlines)
            if not hold.is_live:
                continue
            if hold.expires_at > now:
                self._push(hold)  # it was renewed
            else:
                yield hold

    def _push(self, hold: Hold) -> None:
        self._number += 1
        heapq.heappush(self._deadlines, (hold.expires_at, self._number, hold))

    def _unpin(self, hold: Hold) -> None:
        for manager, pinned, blocks in zip(self._kv_cache.groups, self.pinned, hold.blocks, strict=True):
            for block in reversed(blocks):  # tail first, so that eviction shortens a chain from its end
                unpin(manager.pool, block, holder=hold)
            drop(pinned, blocks)
        hold.blocks = [[] for _ in hold.blocks]

    # -- state ---------------------------------------------------------------------------------------------

    def num_only_held(self, group: int) -> int:
        """Return how many blocks of a KV cache group are on the device for holds alone: no request has a reference to
        them."""
        return self._kv_cache.groups[group].pool.num_unshared(self.pinned[group])

    @property
    def stats(self) -> HoldStats:
        return HoldStats(
            holds=len(self.by_end),
            clients=len(self._clients),
            blocks=len(self._kept[0]),
            device_blocks=len(self.pinned[0]),
            max_blocks=None if self._tiers else self._limits(self._share)[0],
            granted=self.granted,
            refused=dict(self.refused),
            ended=dict(self.ended),
            unused_block_s=self.unused.blocks[0].block_ns / 1e9,
        )

    def check(self) -> None:
        """Raise AssertionError if a hold lacks blocks, or if a limit is exceeded."""
        holds = list(self.by_end.values())
        for group, (manager, pinned) in enumerate(zip(self._kv_cache.groups, self.pinned, strict=True)):
            assert pinned == Counter(b for hold in holds for b in hold.blocks[group]), "a held block is lost"
            assert pinned <= manager.pool.pinned, "a held block is not pinned"
            assert len(pinned) <= self._limits(self._share)[group], "too many blocks are held"
            assert self._kept[group] == Counter(h for hold in holds for h in hold.needed[group]), "a hold is lost"
            for client, counters in self._clients.items():
                own = Counter(h for hold in holds if hold.client == client for h in hold.needed[group])
                assert counters[group] == own, "a client's hold is lost"
                assert self._tiers or len(own) <= self._limits(self._share_per_client)[group], "a client has more"
            assert self._tiers or len(self._kept[group]) <= self._limits(self._share)[group], "too much is held"
        for hold in holds:
            if not hold.tiers:
                assert longest_prefix(self._kv_cache, hold.hashes) == len(hold.hashes), "a held block was evicted"
            for tier in hold.tiers:
                has_lost = any(index.lost_held for index in tier.indexes)
                assert has_lost or tier.holds(hold.keys), "a tier has evicted a held block"
        assert Counter(hold.client for hold in holds) == self._num_of, "a hold of a client is lost"
        assert self._clients.keys() == self._num_of.keys(), "a client is lost"
        pending = {hold for _, _, hold in self._deadlines}
        assert all(hold in pending and hold.is_live for hold in holds), "a hold would never end"


def refused(mark: HoldMark, refusal: HoldRefusal, reason: str) -> HoldOutcome:
    return HoldOutcome(tokens=mark.tokens, ttl_s=mark.ttl_s, refusal=refusal, reason=reason)


def charge(payer: BlockAccount, account: BlockAccount, paid: int) -> None:
    """Charge `payer` with a part of what an account has to pay."""
    account.block_ns -= paid
    payer.block_ns += paid


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
