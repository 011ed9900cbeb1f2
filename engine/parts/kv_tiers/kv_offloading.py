"""Decides which blocks are copied from the KV cache to the tiers below it, and which requests wait for blocks to be
loaded from there. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.core.door.kernel import Kernel
from engine.core.door.offers import Offer
from engine.core.kv_cache_manager import KVCacheManager, Shorten
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.costs.step_cost import StepTimes
from engine.errors import EngineError, ServingError
from engine.parts.block_source import BlockSource
from engine.parts.kept import source_of
from engine.parts.kv_tiers.command_queue import CommandQueue
from engine.parts.kv_tiers.prefix_pins import fits, pin_prefix, unpin, unpin_prefix
from engine.parts.kv_tiers.tier import Tier, TierHashes, tiers_of
from engine.parts.kv_tiers.tier_writer import Store, TierWriter
from engine.wire.parts.kv_offload import (
    FoundBlock,
    KVOffloadStats,
    LoadBlocks,
    StopLoad,
    StoreListing,
    TierAnswer,
    TierBlock,
)

MIN_TOKENS = 32  # a shorter hit costs a round trip for nothing
FORGET = 0.02  # fraction of the learned rate forgotten per load that seemed not to pay, so that it is tried again
MIB = 2**20


class NoTiersBelow:
    """What holds and other engines find below the cache of an engine without tiers."""

    tiers: Sequence[Tier] = ()

    def store(self, keys: Sequence[tuple[int, bytes]]) -> None:
        pass

    def delete(self, keys: Sequence[tuple[int, bytes]]) -> None:
        pass

    def bring(self, hashes: Sequence[Sequence[bytes]], timeout_s: float, then: Callable[[], None], now: float) -> bool:
        return False


@dataclass(slots=True, eq=False)
class BlockLoad:
    """A LoadBlocks command under way. Until it ends, the blocks that it loads are pinned, and so are the blocks of the
    same hit that were on the device already."""

    wanted_by: Request | None
    """The request for which it began; None if another engine wants the blocks."""
    blocks: list[TierBlock]
    hashes: list[bytes]
    pinned: list[tuple[int, int]]
    """(group, block) of each block of the hit that was on the device already."""
    started_at: float
    expected_at: float
    """Time at which it is expected to end."""
    deadline_at: float
    requests: list[Request] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """What to call when it has ended."""
    tokens: int = 0
    is_stopped: bool = False
    is_void: bool = False


class KVOffloading(BlockSource):
    """Decides which blocks are copied to the tiers, and which requests wait for blocks from the tiers.

    Blocks are stored when their request ends: only then is it known that all their numbers are finite, and the next
    turn of a conversation needs the blocks of the answer too. The tail of a sequence is stored before its head, since
    tails are evicted first on the device and in the tiers. The store has separate commands, so that a slow store does
    not delay the disk.

    A request whose next blocks lie in a tier waits while they are loaded, and holds no blocks meanwhile. The loaded
    blocks become ordinary cached blocks even if the request ends meanwhile. The request is then admitted as if they had
    been cached from the start. When its deadline passes, the request computes its prompt instead; blocks that arrive
    later serve other requests. Each request is looked up in the tiers once.

    All KV cache groups take part: the `needed` method of a group's manager returns the blocks that a hit requires.
    """

    _queue: RequestQueue

    def __init__(
        self,
        kv_cache: KVCacheManager,
        tiers: Sequence[Tier],
        *,
        name_of: Callable[[int, bytes], bytes],
        times: StepTimes,
        timeout_s: float,
        block_bytes: Sequence[int],
        min_tokens: int = MIN_TOKENS,
    ):
        """tiers: `host`, `disk` and `store`, the fastest first. name_of: returns the name of a block, given its group
        and hash. timeout_s: seconds for which a request waits for blocks. block_bytes: bytes of a block of each group,
        on all ranks together. min_tokens: shortest hit that is loaded."""
        self._kv_cache, self.tiers, self.name_of, self._times = kv_cache, list(tiers), name_of, times
        self._timeout_s, self._min_tokens, self._bytes = timeout_s, min_tokens, list(block_bytes)
        self._queried_tokens = self._hit_tokens = 0
        self._commands = CommandQueue()
        self._loads: dict[int, BlockLoad] = {}
        self._coming: dict[tuple[int, bytes], BlockLoad] = {}  # by group and hash
        #: The first group's blocks in the tiers.
        self.hashes = TierHashes(kv_cache.pool, self.tiers, name_of)
        lanes = [[tier for tier in tiers if (tier.name == "store") == is_slow] for is_slow in (False, True)]
        self._writers = [
            TierWriter(kv_cache, lane, self._commands, self.hashes, name_of=name_of, block_bytes=self._bytes)
            for lane in lanes
            if lane
        ]
        self.set_names(name_of)

    def set_names(self, name_of: Callable[[int, bytes], bytes]) -> None:
        """Replace the function that returns the names of blocks by one that returns the same."""
        self.name_of = self.hashes.name_of = name_of
        for writer in self._writers:
            writer.name_of = name_of
        for tier in self.tiers:
            tier.name_of = name_of

    def restore(self, name: bytes, size: int, added_at: float) -> None:
        """Enter a block left on disk by an earlier start. Call it for the oldest block first."""
        self._enter(self._named("disk"), FoundBlock(name, size, 0.0), added_at)

    def _enter(self, tier: Tier, block: FoundBlock, added_at: float) -> None:
        """Enter a block that is in a tier already."""
        (index,) = tier.indexes
        if index.knows(block.name):
            return
        evicted = index.add(block.name, block.size, added_at)
        index.written(block.name)
        if evicted is not None:
            self._commands.drop(tier, evicted)
        elif tier.name != "store":  # other engines may hold it there
            self._commands.drop(tier, [block.name])

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        kernel.out.adopt(self._commands.out)
        self._commands.out, self._queue = kernel.out, kernel.queue

    def keeps(self) -> list[Request]:
        waiting = [request for load in self._loads.values() for request in load.requests]
        return [request for request in waiting if request.state is State.LOADING_KV]

    @property
    def moving(self) -> bool:
        """Whether copies under way pin blocks. When they end, waiting requests can use these blocks."""
        return bool(self._loads) or bool(self._copying)

    @property
    def _copying(self) -> list[Store]:
        return [store for writer in self._writers for store in writer.copying]

    def _named(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.name == name)

    # -- up ------------------------------------------------------------------------------------------------

    def offer(self, request: Request, matched: int, shorten: Shorten, watermark: int, now: float) -> Offer | None:
        """Return what the tiers offer a waiting request, as Part.offer says. What holds keep is offered even if
        computing it is expected to be faster."""
        size, whole = self._kv_cache.pool.block_size, len(request.tokens)
        if source_of(request) is not None:
            return None  # an engine holds all of its KV, but not for long
        if request.prefix.looked_below or not fits(self._kv_cache, request, matched, matched * size, whole, watermark):
            return None
        hit = self._kv_cache.match(request, shorten, self._has)
        needed = [group.needed(request.hashes(hit, size)) for group in self._kv_cache.groups]
        tokens = (hit - matched) * size
        for key in ((group, each) for group, hashes in enumerate(needed) for each in hashes):
            if load := self._coming.get(key):
                left_s = max(0.0, load.expected_at - now)
                return None if load.is_stopped else Offer(tokens, left_s, partial(self._join, load, request))
        sizes = self._sizes(needed) if tokens else Counter()
        worth_it = tokens >= self._min_tokens and self._pays(sizes, tokens)
        if not tokens or not (worth_it or self._promised(needed)):
            self._look(request, matched)
            return None
        start = partial(self._load, request, matched, needed, tokens, watermark)
        return Offer(tokens, self._expected_s(sizes) if worth_it else None, start)

    def _look(self, request: Request, matched: int) -> None:
        """Record that it is decided whether a request waits for the tiers."""
        request.prefix.looked_below = True
        self._queried_tokens += max(0, request.num_prompt - matched * self._kv_cache.pool.block_size)

    def _load(
        self, request: Request, matched: int, needed: Sequence[Sequence[bytes]], tokens: int, watermark: int, now: float
    ) -> bool:
        """Start to load blocks for a request. Returns False, and loads nothing, if too few blocks are available."""
        self._look(request, matched)
        load = self._start(request, needed, watermark, now, self._timeout_s)
        if load is None:
            return False
        load.tokens = tokens
        names = " and ".join(tier.name for tier in tiers_of(self.tiers, load.blocks))
        request.note(f"waits for {tokens} tokens of KV from {names}")
        return self._join(load, request, now)

    def bring(self, hashes: Sequence[Sequence[bytes]], timeout_s: float, then: Callable[[], None], now: float) -> bool:
        """Load the blocks that the device lacks and a tier has, up to the first gap of each group, because another
        engine has asked for them. Calls `then` once they are loaded, or loading has failed. Returns False, and does
        nothing, if there are none.

        hashes: of blocks of each KV cache group. timeout_s: seconds that the other engine waits, at most.
        """
        groups = self._kv_cache.groups
        needed = [list(each) for each in hashes]
        for group, wanted in enumerate(needed):
            pool = groups[group].pool
            gap = next((i for i, each in enumerate(wanted) if not (pool.has(each) or self._has(group, each))), None)
            del wanted[len(wanted) if gap is None else gap :]
        missing = [(group, h) for group, some in enumerate(needed) for h in some if not groups[group].pool.has(h)]
        if (load := next((self._coming[key] for key in missing if key in self._coming), None)) is None:
            timeout_s = min(timeout_s, self._timeout_s)
            load = self._start(None, needed, 0, now, timeout_s) if missing else None
        if load is None or load.is_stopped:
            return False
        load.then.append(then)
        return True

    def _start(
        self, request: Request | None, needed: Sequence[Sequence[bytes]], watermark: int, now: float, timeout_s: float
    ) -> BlockLoad | None:
        """Start to load the blocks of these hashes that the device lacks. Returns None, and takes nothing, if too few
        blocks are available."""
        found = pin_prefix(self._kv_cache, needed, watermark)
        if found is None:
            return None
        there, new = found
        sources, ends_at = [self._source(*each) for each in new], now + self._expected_s(self._sizes(needed))
        hashes = [block_hash for _, _, block_hash in new]
        load = BlockLoad(request, sources, hashes, there, now, ends_at, now + timeout_s)
        for source, block_hash in zip(load.blocks, load.hashes, strict=True):
            self._coming[source.group, block_hash] = load
            self._tier(source).index(source.group).begin_read(source.name)
        number = self._commands.new_number()
        self._loads[number] = load
        self._commands.add(LoadBlocks(number, load.blocks))
        return load

    def _join(self, load: BlockLoad, request: Request, now: float) -> bool:
        load.requests.append(request)
        return True

    def _has(self, group: int, block_hash: bytes) -> bool:
        name = self.name_of(group, block_hash)
        return any(tier.has(group, name) for tier in self.tiers) or (group, block_hash) in self._coming

    def _sizes(self, needed: Sequence[Sequence[bytes]]) -> Counter[str]:
        """Return the bytes to load of these blocks, by tier."""
        sizes: Counter[str] = Counter()
        for group, hashes in enumerate(needed):
            missing = [each for each in hashes if not self._kv_cache.groups[group].pool.has(each)]
            for name in (self.name_of(group, each) for each in missing):
                sizes[self._fastest(group, name).name] += self._bytes[group]
        return sizes

    def _expected_s(self, sizes: Counter[str]) -> float:
        """Return the seconds that loading so many bytes of each tier is expected to take; 0 while that is unknown."""
        return sum(tier.cost.of(sizes[tier.name] / MIB) for tier in self.tiers if sizes[tier.name])

    def _pays(self, sizes: Counter[str], tokens: int) -> bool:
        """Return whether loading is expected to be faster than computing these tokens. While a rate is unknown, returns
        True."""
        compute_s = self._times.prompt_token_s * tokens
        pays = not compute_s or self._expected_s(sizes) < compute_s
        for tier in self.tiers:
            if sizes[tier.name] and not pays:
                tier.cost.forget(FORGET)
        return pays

    def _promised(self, needed: Sequence[Sequence[bytes]]) -> bool:
        """Return whether a hold keeps any blocks that the device lacks: then they are loaded even if that is slower."""
        missing = [
            (group, self.name_of(group, each))
            for group, hashes in enumerate(needed)
            for each in hashes
            if not self._kv_cache.groups[group].pool.has(each)
        ]
        return any(name in tier.index(group).held for tier in self.tiers if tier.has_holds for group, name in missing)

    def _source(self, group: int, block: int, block_hash: bytes) -> TierBlock:
        name = self.name_of(group, block_hash)
        tier = self._fastest(group, name)
        slot = tier.index(group).slot(name)
        return TierBlock(group, block, name, slot, tier.name == "disk", tier.name == "store")

    def _fastest(self, group: int, name: bytes) -> Tier:
        """Return the fastest tier that has a block."""
        return next(tier for tier in self.tiers if tier.has(group, name))

    def _tier(self, block: TierBlock) -> Tier:
        """Return the tier from which a command loads a block."""
        return next(tier for tier in self.tiers if tier.takes(block))

    def _end_load(self, number: int, failed: set[int], is_unreachable: bool, now: float) -> None:
        """Record which blocks have been loaded. is_unreachable: whether the store itself failed, not single blocks."""
        load = self._loads.pop(number)
        if is_unreachable and not load.is_stopped:
            self._named("store").failed("read", len(failed), now)
        moved: Counter[str] = Counter()  # blocks' bytes, by tier
        came: dict[str, list[bytes]] = {}  # hashes of the first group's blocks, by tier
        if (request := load.wanted_by) is not None:
            for pool in (manager.pool for manager in self._kv_cache.groups):
                pool.describe(request, 0, len(request.tokens) // pool.block_size)
        for i in reversed(range(len(load.blocks))):  # tail first, so that eviction shortens a chain from its end
            block, block_hash = load.blocks[i], load.hashes[i]
            tier, index = self._tier(block), self._tier(block).index(block.group)
            del self._coming[block.group, block_hash]
            index.end_read(block.name)
            pool = self._kv_cache.groups[block.group].pool
            if i not in failed and not load.is_void:
                unpin(pool, block.block, block_hash)
                self.hashes.add(block.group, block.name, block_hash)
                index.touch([block.name])
                moved[tier.name] += self._bytes[block.group]
                if not block.group:
                    came.setdefault(tier.name, []).append(block_hash)
                continue
            unpin(pool, block.block)
            is_there = load.is_stopped or (is_unreachable and tier.name == "store")
            if load.is_void or not is_there:
                tier.errors.update([] if load.is_void else ["read"])
                index.remove(block.name)
                self._commands.drop(tier, [block.name])
        unpin_prefix(self._kv_cache, load.pinned)
        if self.arrivals is not None and request is not None:
            for name, hashes in came.items():
                self.arrivals.came(self, name, name, request, hashes)
        self._measure(moved, now - load.started_at, complete=not failed)
        self._hit_tokens += 0 if failed or load.is_void else load.tokens
        for request in load.requests:
            request.note(f"{len(load.blocks) - len(failed)} of {len(load.blocks)} blocks were loaded")
        self._wait(load.requests)
        for then in load.then:
            then()

    def quarantine(self, name: str) -> None:
        self._named(name).quarantine()

    def _measure(self, moved: Counter[str], seconds: float, complete: bool) -> None:
        """Learn the rate of a tier from a load. If several tiers took part, the time is attributed to the slowest."""
        for tier in self.tiers:
            tier.moved["read"] += moved[tier.name]
        slowest = next((tier for tier in reversed(self.tiers) if moved[tier.name]), None)
        if slowest is not None:
            slowest.seconds["read"] += seconds
            if complete:
                slowest.cost.observe(moved[slowest.name] / MIB, seconds)

    def _wait(self, requests: Sequence[Request]) -> None:
        """Queue requests again that have waited for a load."""
        for request in requests:
            if request.state is State.LOADING_KV:
                self._queue.wait(request)

    # -- down ----------------------------------------------------------------------------------------------

    def ending(self, request: Request, error: ServingError | None) -> None:
        """Record the end of a request, which still has its blocks."""
        if not request.tables:
            return
        if isinstance(error, EngineError):
            self.invalidated(request)
            return
        groups = enumerate(self._kv_cache.groups)
        keys = [(group, each) for group, manager in groups for each in reversed(manager.worth_storing(request))]
        for writer in self._writers:
            writer.add(keys)

    def invalidated(self, request: Request) -> None:
        """Delete all blocks of a request from the tiers, since they may hold non-finite numbers. The device has dropped
        them already."""
        size = self._kv_cache.pool.block_size
        hashes = request.hashes(min(request.computed, len(request.tokens)) // size, size)
        self.delete([(group, each) for group in range(len(self._kv_cache.groups)) for each in hashes])

    # -- holds ---------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Copy blocks, given by group and hash, to the tiers that lack them. The caller keeps them on the device."""
        for writer in self._writers:
            writer.add_held(keys)

    def delete(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Delete blocks from all tiers, even blocks that are not written yet, unless they are being read or held."""
        for writer in self._writers:
            writer.discard(keys)
        for tier in self.tiers:
            names = [(group, self.name_of(group, block_hash)) for group, block_hash in keys]
            self._commands.drop(tier, [name for group, name in names if tier.index(group).drop(name)])

    # -- commands ------------------------------------------------------------------------------------------

    def answered(self, answer: TierAnswer | StoreListing, now: float) -> None:
        """Record an answer of all ranks, or what other engines have done to the store."""
        if isinstance(answer, StoreListing):
            self._listed(answer, now)
            return
        if answer.number in self._loads:
            self._end_load(answer.number, set(answer.failed), answer.is_unreachable, now)
            return
        writer = next(writer for writer in self._writers if writer.owns(answer.number))
        if answer.copied:
            writer.copied(answer.number)
        else:
            writer.written(answer.number, set(answer.failed), now)

    def _listed(self, listing: StoreListing, now: float) -> None:
        """Enter the blocks that other engines have written to the store, and forget those that they have deleted,
        except for blocks that this engine is reading."""
        store = self._named("store")
        (index,) = store.indexes
        for name in listing.removed:
            if index.has(name) and not index.is_read(name):
                index.remove(name)
        for block in listing.added:
            self._enter(store, block, now - block.age_s)

    def update(self, now: float) -> None:
        """Stop loads whose time is over, forget blocks that have been kept for long, and go on storing."""
        for number, load in self._loads.items():
            if now >= load.deadline_at and not load.is_stopped:
                load.is_stopped = True
                self._commands.add(StopLoad(number))
                tiers_of(self.tiers, load.blocks)[-1].failed("deadline", len(load.blocks), now)
                for request in load.requests:
                    request.note(
                        f"waited {load.deadline_at - load.started_at:g} s for KV from a tier; computes it instead"
                    )
                self._wait(load.requests)
                load.requests = []
        for writer in self._writers:
            writer.check_deadlines(now)
        for tier in self.tiers:
            tier.rests = now < tier.rests_until
            for index in tier.indexes:
                self._commands.drop(tier, index.expire(now))
        for writer in self._writers:
            if not self._copying:
                writer.start(now)
        self.hashes.update()

    def flushed(self) -> bool:
        """Return whether all blocks waiting to be stored have been written, except those that cannot be."""
        return all(writer.flushed for writer in self._writers)

    def cleared(self) -> None:
        """Delete all blocks of all tiers."""
        for writer in self._writers:
            writer.clear()
        for load in self._loads.values():
            load.is_void = True
        for tier in self.tiers:
            for index in tier.indexes:
                self._commands.drop(tier, index.clear())

    # -- state ---------------------------------------------------------------------------------------------

    def report(self) -> KVOffloadStats:
        return KVOffloadStats(
            tiers={tier.name: tier.stats() for tier in self.tiers},
            loading=len(self.keeps()),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            not_stored=sum(writer.not_stored for writer in self._writers),
        )

    def audit(self, running: Sequence[Request]) -> None:
        """Raise AssertionError unless tiers and pins add up."""
        for tier in self.tiers:
            for index in tier.indexes:
                index.check()
        pins = Counter(pin for load in self._loads.values() for pin in load.pinned)
        moves: list[Store | BlockLoad] = [*self._loads.values(), *self._copying]
        pins += Counter((block.group, block.block) for move in moves for block in move.blocks)
        found = [(group, block) for group, m in enumerate(self._kv_cache.groups) for block in m.pool.pinned.elements()]
        assert pins <= Counter(found), "a pin is lost"  # the others are of blocks that other engines fetch
        keys = {(b.group, h) for load in self._loads.values() for b, h in zip(load.blocks, load.hashes, strict=True)}
        assert keys == self._coming.keys(), "a load is lost"
