"""Decides which prompts stay cached for a time because their clients asked for it. Pure Python."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from engine.core.engine_stats import block_load
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, State
from engine.costs.block_usage import BlockUsage
from engine.costs.request_cost import RequestCost, cost_of
from engine.parts.holds.hold_table import Hold, HoldTable, PromptOfHold, refused
from engine.parts.holds.request_holds import RequestHolds, holds_of
from engine.parts.kept import adapter_of
from engine.parts.kept_prefixes import KeepsPrefixes
from engine.parts.kv_tiers.kv_offloading import KVOffloading, NoTiersBelow
from engine.parts.kv_tiers.prefix_pins import longest_prefix
from engine.parts.kv_tiers.tier import Tier
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import HeldPrompt, HoldEnd, HoldMark, HoldStats, PromptHold
from engine.wire.remote_request import RemoteRequest

RETRY_S = 1.0  # after which blocks that are in no tier are copied again


class Holds(KeepsPrefixes):
    """Keeps prefixes in the prefix cache, or in a tier below it, until their time ends.

    A hold is granted or refused once its prompt is computed up to the mark; the outcome is sent with the first token.
    From then on its blocks cannot be evicted until its time ends, it is released, or the prefix cache is emptied. Its
    time starts anew whenever a request of the same client begins with the tokens of the hold. That request also pays
    for the memory that the hold has taken since the one before.

    Holds of one client share their blocks. A new hold replaces earlier holds of the same client and name that are
    prefixes of it and would not last longer, so a growing conversation has one hold and not one for each turn.

    HoldTable limits what all holds keep. With tiers, the device keeps the blocks only until their request has ended and
    a tier has a copy of all of them. If each tier has lost a block, for instance because a file is damaged, the hold
    ends.
    """

    asks = PromptHold

    def __init__(
        self,
        kv_cache: KVCacheManager,
        offloading: KVOffloading | NoTiersBelow | None = None,
        usages: Sequence[BlockUsage] = (),
        *,
        max_model_len: int,
        max_share: float,
        max_share_per_client: float,
        max_ttl_s: float,
    ):
        """usages: of the pool of each KV cache group, by which requests pay for holds; empty if nobody pays.
        max_share: fraction of each group's blocks, or of a tier, for all holds; max_share_per_client: for the holds
        of one client. max_ttl_s: longest time of a hold, in seconds."""
        self._kv_cache, self._below, self._max_ttl_s = kv_cache, offloading or NoTiersBelow(), max_ttl_s
        self._block_size = kv_cache.pool.block_size
        #: Tiers that keep holds: other engines delete from a store.
        self.tiers = [tier for tier in self._below.tiers if tier.name != "store"]
        self.table = HoldTable(
            kv_cache,
            self.tiers,
            usages,
            max_model_len=max_model_len,
            max_share=max_share,
            max_share_per_client=max_share_per_client,
        )
        self._to_move: dict[Hold, Request] = {}  # holds that tiers are to keep, with the requests that computed them

    @property
    def ends(self) -> Sequence[bytes]:
        """Hashes of the last blocks of all holds."""
        return [block_hash for _, block_hash in self.table.by_end]

    # -- granting ------------------------------------------------------------------------------------------

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        holds = request.of[self.asks.part] = RequestHolds.of(asked, request.num_prompt)
        request.marks = sorted([*request.marks, *(mark.tokens for mark in holds.marks)])

    def passed(self, request: Request, computed: int, now: float) -> None:
        """Grant or refuse the holds of a request whose marks are within its first `computed` tokens, which have been
        entered into the prefix cache."""
        for mark in holds_of(request).take_marks(computed):
            outcome = self._ask(request, mark, now)
            request.news.append(outcome)
            if outcome.refusal is None:
                self.table.granted += 1
                request.note(f"{outcome.tokens} tokens are held for {outcome.ttl_s:g} s")
            else:
                self.table.refused[outcome.refusal] += 1
                request.note(f"a hold of {outcome.tokens} tokens is refused: {outcome.reason}")

    def _ask(self, request: Request, mark: HoldMark, now: float) -> HoldOutcome:
        self.update(now)
        size = self._block_size
        if mark.ttl_s > self._max_ttl_s:
            return refused(mark, "ttl", f"its time of {mark.ttl_s:g} s is above max_hold_s ({self._max_ttl_s:g})")
        hashes = request.hashes(mark.tokens // size, size)
        if not hashes:
            return refused(mark, "short", f"its {mark.tokens} tokens are less than a block of {size}")
        hashes = hashes[: longest_prefix(self._kv_cache, hashes)]
        if not hashes:
            return refused(mark, "not_cached", "this engine has not kept all KV or state of these tokens")
        asked, expires_at = holds_of(request), now + (mark.ttl_s if mark.left_s is None else mark.left_s)
        if (same := self.table.by_end.get((asked.client, hashes[-1]))) is not None:
            self.table.pay(same, cost_of(request))
            same.renew(mark.ttl_s, expires_at)
            if same.name != asked.name:
                same.name = ""  # it is that of several conversations: none of them may end it
            if same.response_id != asked.response_id:
                same.response_id = ""
            return HoldOutcome(tokens=len(hashes) * size, ttl_s=same.ttl_s)
        needed = [list(group.needed(hashes)) for group in self._kv_cache.groups]
        blocks = [g.pool.match(some) for g, some in zip(self._kv_cache.groups, needed, strict=True)]
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
            None if request.prefix.places else prompt_of(request, len(hashes) * size),
        )
        replaced = [each for each in self.table.prefixes(asked.client, hashes) if self._replaces(hold, each)]
        if (refusal := self.table.lacks(mark, hold, replaced)) is not None:
            return refusal
        self.table.begin(hold)
        if self.tiers:
            self._to_move[hold] = request
        for earlier in replaced:
            self._end(earlier, cost=cost_of(request))
        return HoldOutcome(tokens=len(hashes) * size, ttl_s=mark.ttl_s)

    def _replaces(self, hold: Hold, earlier: Hold) -> bool:
        is_of_same_request = earlier.request_id == hold.request_id
        return earlier.name == hold.name and earlier.expires_at <= hold.expires_at and not is_of_same_request

    # -- using ---------------------------------------------------------------------------------------------

    def reserved(self, request: Request, matched: int, now: float) -> None:
        """Renew the holds that a request has read: those of its client within its first `matched` blocks, which were
        cached."""
        if self.table.by_end and matched and (asked := holds_of(request)).renews:
            self.update(now)
            for hold in self.table.prefixes(asked.client, request.hashes(matched, self._block_size)):
                hold.renew(hold.ttl_s, now + hold.ttl_s)
                self.table.pay(hold, cost_of(request))

    # -- giving to another engine --------------------------------------------------------------------------

    def give(self, limit: int, now: float) -> list[HeldPrompt]:
        """Return up to `limit` holds for another engine that takes them over, those that last longest first. Each hold
        is returned once, unless it is used again. Leaves out holds whose prompts contain images."""
        self.update(now)
        held = [hold for hold in self.table.by_end.values() if not hold.was_given]
        given: list[HeldPrompt] = []
        for hold in sorted(held, key=lambda hold: -hold.expires_at):
            if hold.prompt is not None and len(given) < limit:
                hold.was_given = True
                given.append(held_prompt(hold, hold.prompt, now))
        return given

    # -- moving down, and ending ---------------------------------------------------------------------------

    def update(self, now: float) -> None:
        """End the holds whose time is over, and move holds to tiers that have a copy of their blocks."""
        for hold in self.table.overdue(now):
            self._end(hold, "expired")
        for hold, request in list(self._to_move.items()):
            if request.state is State.FINISHED:  # before, its blocks may turn out to hold non-finite numbers
                self._move(hold, now)
        for tier in self.tiers:
            if any(index.lost_held for index in tier.indexes):
                self._look_for_losses(tier)

    def _move(self, hold: Hold, now: float) -> None:
        """Move a hold to the tiers with its blocks and room."""
        there = [tier for tier in self.table.roomy_tiers() if tier.has_all(hold.keys)]
        if there:
            del self._to_move[hold]
            self.table.keep_in(hold, there)
        elif hold.stored_at is None or now >= hold.stored_at + RETRY_S:
            hold.stored_at = now
            self._below.store(hold.keys)

    def _look_for_losses(self, tier: Tier) -> None:
        """After this tier has lost held blocks, end the holds whose blocks are no longer complete in any tier."""
        for index in tier.indexes:
            index.lost_held = False
        for hold in [hold for hold in self.table.by_end.values() if tier in hold.tiers]:
            if tier.holds(hold.keys):
                continue
            self.table.leave(hold, tier)
            if not hold.tiers:
                self._end(hold, "lost")

    def release(self, name: str, client: str | None) -> None:
        """End the holds that have this name, or are of the response with this id, and delete their blocks from the
        tiers. client: None for all clients."""
        deleted: list[tuple[int, bytes]] = []
        for hold in [hold for hold in self.table.by_end.values() if client in (None, hold.client)]:
            if name in (hold.name, hold.response_id):
                self._end(hold, "released")
                deleted += hold.keys
        self._below.delete(deleted)

    def invalidated(self, request: Request) -> None:
        """End the holds that share blocks with a request, since these may hold non-finite numbers."""
        known = min(request.computed, len(request.tokens)) // self._block_size
        hashes = set(request.hashes(known, self._block_size))
        for hold in [hold for hold in self.table.by_end.values() if not hashes.isdisjoint(hold.hashes)]:
            self._end(hold, "invalid")

    def cleared(self) -> None:
        """End all holds, because the prefix cache is emptied."""
        for hold in list(self.table.by_end.values()):
            self._end(hold, "cleared")

    def _end(self, hold: Hold, why: HoldEnd | None = None, cost: RequestCost | None = None) -> None:
        """End a hold. why: None if another hold replaces it. cost: as for HoldTable.end."""
        self._to_move.pop(hold, None)
        self.table.end(hold, why, cost)

    # -- state ---------------------------------------------------------------------------------------------

    def load(self, requests: Iterable[Request]) -> dict[str, Any]:
        """Blocks kept by holds alone count as if they were not there."""
        pools = self._kv_cache.pools
        return block_load(pools, [self.table.num_only_held(group) for group in range(len(pools))])

    def report(self) -> HoldStats:
        return self.table.stats

    def audit(self, running: Sequence[Request]) -> None:
        """Raise AssertionError if a hold lacks blocks, or if a limit is exceeded."""
        self.table.check()
        assert all(hold.is_live and not hold.tiers for hold in self._to_move), "an ended hold would move"


def prompt_of(request: Request, num_tokens: int) -> PromptOfHold:
    return PromptOfHold(array("I", request.tokens[:num_tokens]), request.prefix.salt, adapter_of(request))


def held_prompt(hold: Hold, prompt: PromptOfHold, now: float) -> HeldPrompt:
    return HeldPrompt(
        token_ids=prompt.tokens.tolist(),
        cache_salt=prompt.cache_salt,
        adapter=prompt.adapter,
        client=hold.client,
        name=hold.name,
        response_id=hold.response_id,
        ttl_s=hold.ttl_s,
        left_s=hold.expires_at - now,
    )
