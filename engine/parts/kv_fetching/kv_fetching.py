"""Fetches KV of the first tokens of prompts from other engines, and lets other engines fetch. Pure Python.

A fetch is a handoff of blocks by name (kv_transfer/protocol/protocol.py). The router names the engine that has a longer
prefix of a prompt than this one. If fetching the blocks is expected to be faster than computing them, the request waits
for them, and holds no blocks meanwhile. Fetched blocks become ordinary cached blocks, even if the request ends, and the
request is admitted as if they had always been there. If they do not arrive, they are computed here.

If the other engine has some of the blocks only in its tiers, it loads them first. It does not send blocks that it
cannot load in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.core.door.kernel import Kernel
from engine.core.door.offers import Offer
from engine.core.kv_cache_manager import KVCacheManager, Shorten
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.costs.step_cost import LinearCost, StepTimes
from engine.parts.block_source import BlockSource
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.kept import source_of
from engine.parts.kv_tiers.kv_offloading import KVOffloading, NoTiersBelow
from engine.parts.kv_tiers.prefix_pins import fits, pin, pin_prefix, unpin, unpin_prefix
from engine.wire.block_hash import BLOCK_HASH_BYTES
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import (
    NO_TOKEN,
    BlocksAsked,
    CancelHandoff,
    Closed,
    Failed,
    FirstToken,
    HandoffEvent,
    HoldBlocks,
    OpenHandoff,
    Quarantine,
    Received,
    RefusePrefill,
)
from engine.wire.parts.kv_fetching import FetchStats, KVHolder
from engine.wire.remote_request import Peer, RemoteRequest

MIN_TOKENS = 32  # a shorter hit costs a round trip for nothing
BRING_SHARE = 0.5  # of the time that the other engine waits, in which blocks come up from tiers here
HELD_SHARE = 2  # of a group's blocks, at most one of so many is held for other engines
RATE_MEMORY = 100.0  # fetches after which an observation's weight is 1/e
FORGET = 0.02  # fraction of the learned rate forgotten per fetch that seemed not to pay, so that it is tried again
MIB = 2**20


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """What another engine is asked for."""

    holder: KVHolder
    needed: Sequence[Sequence[bytes]]
    """Hashes of the blocks of each KV cache group that the prefix consists of."""
    skip: int
    """Leading tokens that are cached here."""
    upto: int
    """Leading tokens of the prefix."""
    expected_s: float
    """Time that the fetch is expected to take."""
    times: str
    """That time and what computing takes, as a sentence."""


@dataclass(slots=True, eq=False)
class PendingFetch:
    """A handoff under way. Until it ends, the blocks that it fills are pinned, and so are the blocks of the same prefix
    that this engine had already."""

    handoff_id: str
    engine_id: str
    wanted_by: Request
    """The request for which it began."""
    blocks: list[tuple[int, int, bytes]]
    """(group, block, hash) of the blocks that it fills, in the order of the handoff."""
    pinned: list[tuple[int, int]]
    """(group, block) of the blocks of the prefix that this engine had already."""
    skip: int
    """Leading tokens that it leaves out, as this engine has them."""
    upto: int
    """Leading tokens that this engine has after it, if all blocks arrive."""
    started_at: float
    expected_at: float
    """Time at which it is expected to end."""
    deadline_at: float
    requests: list[Request] = field(default_factory=list)
    """Requests that wait for it."""
    is_void: bool = False
    """Whether the cache has been emptied meanwhile."""


HOLDER = "kv_fetching"  # in Request.of: the engine from whose cache its first tokens can be fetched


class KVFetching(BlockSource):
    """Fetches the first blocks of prompts from the caches and tiers of other engines, and lets other engines fetch."""

    asks = KVHolder
    _queue: RequestQueue

    def __init__(
        self,
        kv_cache: KVCacheManager,
        handoffs: Handoffs,
        offloading: KVOffloading | NoTiersBelow | None = None,
        *,
        peer: Peer,
        times: StepTimes,
        timeout_s: float,
        block_bytes: Sequence[int],
        min_tokens: int = MIN_TOKENS,
    ):
        """peer: this engine as others address it. timeout_s: seconds for which a request waits for blocks. block_bytes:
        bytes of a block of each group on all ranks. min_tokens: shortest hit that is fetched."""
        self.peer = peer
        #: Fetches by what became of them: `received`, `failed`, or `costs_more` for those that were not worth it.
        self.fetches: Counter[str] = Counter()
        self.fetched_tokens = 0
        #: Seconds of a fetch by its MiB.
        self.link_cost = LinearCost(RATE_MEMORY)
        self._kv_cache, self._requests, self._times = kv_cache, handoffs.requests, times
        handoffs.listeners.append(self.heard)
        self._timeout_s, self._bytes = timeout_s, block_bytes
        self._min_tokens, self._below = min_tokens, offloading or NoTiersBelow()
        #: What other engines have asked for and tiers have loaded, or could not load, with the deadline of the answer.
        self.brought: list[tuple[BlocksAsked, float]] = []
        self._fetches: dict[str, PendingFetch] = {}  # by handoff id
        self._coming: dict[tuple[int, bytes], PendingFetch] = {}  # by group and hash
        self._held: dict[str, list[tuple[int, int]]] = {}  # (group, block) held for others, by handoff id

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._queue = kernel.queue

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        request.of[HOLDER] = asked.record(KVHolder)

    def keeps(self) -> list[Request]:
        found = [request for fetch in self._fetches.values() for request in fetch.requests]
        return [request for request in found if request.state is State.LOADING_KV]

    @property
    def moving(self) -> bool:
        """Whether any blocks are pinned."""
        return bool(self._fetches or self._held or self.brought)

    # -- blocks of other engines ---------------------------------------------------------------------------

    def offer(self, request: Request, matched: int, shorten: Shorten, watermark: int, now: float) -> Offer | None:
        """Return what the cache of another engine offers a waiting request, as Part.offer says."""
        holder, size, whole = request.of.get(HOLDER), self._kv_cache.pool.block_size, len(request.tokens)
        if source_of(request) is not None:  # it moves here, with all of its KV
            return None
        if holder is None or not fits(self._kv_cache, request, matched, matched * size, whole, watermark):
            return None
        held = set(request.hashes(min(holder.num_tokens, whole - 1) // size, size))
        hit = self._kv_cache.match(request, shorten, lambda group, block_hash: block_hash in held)
        needed = [group.needed(request.hashes(hit, size)) for group in self._kv_cache.groups]
        tokens = (hit - matched) * size
        for key in ((group, each) for group, hashes in enumerate(needed) for each in hashes):
            if fetch := self._coming.get(key):
                return Offer(tokens, max(0.0, fetch.expected_at - now), partial(self._join, fetch, request))
        size_mib = self._missing_bytes(needed) / MIB
        expected_s, compute_s = self.link_cost.of(size_mib), self._times.prompt_token_s * tokens
        times = f"fetching {size_mib:.1f} MiB takes about {expected_s:.3g} s, computing {compute_s:.3g} s"
        if not self._may_ask(holder, tokens):
            request.of[HOLDER] = None
            return None
        if compute_s and expected_s >= compute_s:
            request.of[HOLDER] = None
            self.fetches["costs_more"] += 1
            self.link_cost.forget(FORGET)
            request.note(f"{tokens} tokens of {holder.engine.engine_id} to be computed here: {times}")
            return None
        wanted = WantedPrefix(holder, needed, matched * size, hit * size, expected_s, times)
        return Offer(tokens, expected_s, partial(self._fetch, request, wanted, watermark))

    def _join(self, fetch: PendingFetch, request: Request, now: float) -> bool:
        fetch.requests.append(request)
        return True

    def _fetch(self, request: Request, wanted: WantedPrefix, watermark: int, now: float) -> bool:
        """Ask another engine for blocks. Returns False, and asks for nothing, if too few blocks are available, or none
        is missing."""
        request.of[HOLDER] = None  # it is asked once
        pinned = pin_prefix(self._kv_cache, wanted.needed, watermark)
        if pinned is None:
            return False
        there, blocks = pinned
        if not blocks:
            unpin_prefix(self._kv_cache, there)
            return False
        engine_id = wanted.holder.engine.engine_id
        request.note(f"{wanted.upto - wanted.skip} tokens of {engine_id} to be fetched: {wanted.times}")
        handoff_id = self._open(request, wanted, blocks)
        fetch = self._fetches[handoff_id] = PendingFetch(
            handoff_id,
            engine_id,
            request,
            blocks,
            there,
            skip=wanted.skip,
            upto=wanted.upto,
            started_at=now,
            expected_at=now + wanted.expected_s,
            deadline_at=now + self._timeout_s,
            requests=[request],
        )
        self._coming.update(((group, block_hash), fetch) for group, _, block_hash in blocks)
        return True

    def _may_ask(self, holder: KVHolder, tokens: int) -> bool:
        engine = holder.engine
        return tokens >= self._min_tokens and engine != self.peer and engine.engine_id not in self._requests.resting

    def _missing_bytes(self, needed: Sequence[Sequence[bytes]]) -> int:
        """Return the bytes of those of these blocks that this engine lacks."""
        pools = [manager.pool for manager in self._kv_cache.groups]
        return sum(
            self._bytes[group] for group, hashes in enumerate(needed) for each in hashes if not pools[group].has(each)
        )

    def _open(self, request: Request, wanted: WantedPrefix, blocks: Sequence[tuple[int, int, bytes]]) -> str:
        """Ask for the blocks. Returns the id of the handoff."""
        groups = range(len(self._kv_cache.groups))
        local = [[block for of, block, _ in blocks if of == group] for group in groups]
        names = [b"".join(each for of, _, each in blocks if of == group) for group in groups]
        remote_request = self._requests.prefix(request, wanted.skip, wanted.upto, self._timeout_s)
        self._requests.ask(OpenHandoff(remote_request, local[0], local[1:], wanted.holder.engine, names))
        return remote_request.handoff_id

    def update(self, now: float) -> None:
        """Answer other engines once the tiers have loaded what they asked for. Cancel the fetches whose deadline has
        passed; their requests continue once nothing writes into the blocks."""
        brought, self.brought = self.brought, []
        for asked, deadline_at in brought:
            self._hold(asked, now, deadline_at)
        for fetch in self._fetches.values():
            if now >= fetch.deadline_at:
                fetch.deadline_at = float("inf")
                self._requests.send(CancelHandoff(fetch.handoff_id))

    def _end(self, event: Received | Failed, now: float) -> None:
        """Enter the blocks that have arrived into the prefix cache, and queue the requests that waited for them."""
        fetch = self._fetches.pop(event.handoff_id)
        upto = event.first.cached if isinstance(event, Received) else event.verified
        came = 0 if fetch.is_void else self._count(fetch, upto)
        for manager in self._kv_cache.groups:
            manager.pool.describe(fetch.wanted_by, 0, len(fetch.wanted_by.tokens) // manager.pool.block_size)
        for i in reversed(range(len(fetch.blocks))):  # tail first, so that eviction shortens a chain from its end
            group, block, block_hash = fetch.blocks[i]
            del self._coming[group, block_hash]
            pool = self._kv_cache.groups[group].pool
            if i >= came:
                pool.invalidate([block])  # parts of numbers may have come
            unpin(pool, block, block_hash if i < came else None)
        unpin_prefix(self._kv_cache, fetch.pinned)
        self.fetches["received" if isinstance(event, Received) else "failed"] += 1
        if came:
            self.fetched_tokens += upto - fetch.skip
        if isinstance(event, Received):
            num_bytes = sum(self._bytes[group] for group, _, _ in fetch.blocks[:came])
            self.link_cost.observe(num_bytes / MIB, now - fetch.started_at)
            if self.arrivals is not None and self._requests.same_bits(event.first):
                hashes = [block_hash for group, _, block_hash in fetch.blocks[:came] if not group]
                self.arrivals.came(self, "fetch", fetch.engine_id, fetch.wanted_by, hashes)
        why = f": {event.reason} {event.detail}".rstrip() if isinstance(event, Failed) else ""
        for request in fetch.requests:
            request.note(f"{came} of {len(fetch.blocks)} blocks have come from {fetch.engine_id}{why}")
            if request.state is State.LOADING_KV:
                self._queue.wait(request)

    def _count(self, fetch: PendingFetch, upto: int) -> int:
        """Return how many leading blocks of a fetch are complete once the KV of the first `upto` tokens has arrived."""
        if upto == fetch.upto:
            return len(fetch.blocks)
        size = self._kv_cache.pool.block_size
        each_has_all_layers = len(self._kv_cache.groups) == 1 and len(fetch.blocks) * size == fetch.upto - fetch.skip
        return (upto - fetch.skip) // size if each_has_all_layers else 0

    # -- blocks of this engine -----------------------------------------------------------------------------

    def _hold(self, asked: BlocksAsked, now: float, deadline_at: float) -> None:
        """Hold blocks for another engine, or refuse to. If tiers have blocks that the device lacks, they are loaded
        first."""
        if now < deadline_at and self._bring(asked, now, deadline_at):
            return
        blocks, problem = self._find(asked)
        if problem:
            self._requests.send(RefusePrefill(asked.remote_request, problem))
            return
        for group, block in blocks:
            pin(self._kv_cache.groups[group].pool, [block])
        self._held[asked.handoff_id] = blocks
        whole = len(blocks) == sum(map(len, asked.names)) // BLOCK_HASH_BYTES
        upto = asked.upto if whole else asked.remote_request.skip + len(blocks) * self._kv_cache.pool.block_size
        first = FirstToken(NO_TOKEN, None, b"", upto, [], self.peer.engine_id, self._requests.numerics)
        ids = [block for _, block in blocks]
        self._requests.send(HoldBlocks(asked.remote_request, upto, ids, first))

    def _bring(self, asked: BlocksAsked, now: float, deadline_at: float) -> bool:
        """Return whether blocks are being loaded for another engine."""
        groups = self._kv_cache.groups
        if asked.remote_request.fingerprint != self._requests.fingerprint or len(asked.names) != len(groups):
            return False
        hashes = [split_names(names) for names in asked.names]
        if any(self._num_held(i) + len(some) > self._may_hold(i) for i, some in enumerate(hashes)):
            return False
        return self._below.bring(hashes, deadline_at - now, partial(self.has_brought, asked, deadline_at), now)

    def has_brought(self, asked: BlocksAsked, deadline_at: float) -> None:
        """Have the next `update` answer another engine, since the tiers have loaded, or could not load, what it asked
        for."""
        self.brought.append((asked, deadline_at))

    def _num_held(self, group: int) -> int:
        """Return how many blocks of a group are held for other engines."""
        return sum(of == group for blocks in self._held.values() for of, _ in blocks)

    def _may_hold(self, group: int) -> int:
        return max(1, self._kv_cache.groups[group].pool.num_blocks // HELD_SHARE)

    def _find(self, asked: BlocksAsked) -> tuple[list[tuple[int, int]], str]:
        """Return (group, block) of the blocks that another engine has asked for, and the reason why they cannot be
        fetched, or an empty string. Only a model with one group that keeps all tokens can use just some of them."""
        theirs, groups = asked.remote_request.fingerprint, self._kv_cache.groups
        if theirs != self._requests.fingerprint:
            return [], f"fingerprint {theirs} is not that of this engine ({self._requests.fingerprint})"
        if len(asked.names) != len(groups):
            return [], f"blocks of {len(asked.names)} KV cache groups, not of {len(groups)}"
        found: list[tuple[int, int]] = []
        for group, (manager, names) in enumerate(zip(groups, asked.names, strict=True)):
            hashes = split_names(names)
            there = manager.pool.match(hashes)
            if len(there) < len(hashes) and (len(groups) > 1 or manager.window is not None or not there):
                return [], f"group {group} has only {len(there)} of {len(hashes)} blocks"
            held = self._num_held(group)
            if held + len(there) > self._may_hold(group):
                return [], f"{held} blocks of group {group} are held for other engines already"
            found += [(group, block) for block in there]
        return found, "" if found else "no blocks are named"

    # -- events --------------------------------------------------------------------------------------------

    def heard(self, event: HandoffEvent, now: float) -> bool:
        match event:
            case BlocksAsked():
                timeout_s = event.remote_request.timeout_s
                self._hold(event, now, now + BRING_SHARE * (self._timeout_s if timeout_s is None else timeout_s))
            case Closed(handoff_id) if handoff_id in self._held:
                unpin_prefix(self._kv_cache, self._held.pop(handoff_id))
            case Received(handoff_id) | Failed(handoff_id) if handoff_id in self._fetches:
                self._end(event, now)
            case _:
                return False
        return True

    def quarantine(self, name: str) -> None:
        self._requests.send(Quarantine(name))

    def report(self) -> FetchStats:
        return FetchStats(dict(self.fetches), self.fetched_tokens)

    def cleared(self) -> None:
        """Discard the blocks that are still to arrive, since the cache is emptied."""
        for fetch in self._fetches.values():
            fetch.is_void = True


def split_names(names: bytes) -> list[bytes]:
    return [names[i : i + BLOCK_HASH_BYTES] for i in range(0, len(names), BLOCK_HASH_BYTES)]
