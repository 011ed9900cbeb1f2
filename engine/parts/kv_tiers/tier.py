"""One tier below the KV cache, and the hashes of what is in the tiers. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.block_pool import BlockPool
from engine.costs.request_cost import BlockAccount
from engine.costs.step_cost import LinearCost
from engine.costs.tier_usage import TierUsage
from engine.costs.units import GIB_NS
from engine.kv_offload.tier_index import TierIndex
from engine.wire.parts.kv_offload import TierBlock, TierStats

REST_S = 30.0  # without a tier that has failed or was late
RATE_MEMORY = 100.0  # loads after which an observation's weight is 1/e


@dataclass(slots=True, eq=False)  # compared by identity
class Tier:
    """One tier, and its statistics."""

    name: str
    indexes: list[TierIndex]
    """One per KV cache group, or one for all."""
    sizes: list[int]
    """Size of a block of each group in its index: its bytes on all ranks together, or 1 in host memory (one slot)."""
    unit_bytes: list[int]
    """Bytes of one unit of size, for each index."""
    rests_until: float = float("-inf")
    rests: bool = False
    cost: LinearCost = field(default_factory=lambda: LinearCost(RATE_MEMORY))
    """Seconds that a load takes, by its MiB."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes moved since the start, by `read` and `write`."""
    seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    errors: Counter[str] = field(default_factory=Counter)
    usages: list[TierUsage] = field(init=False)
    """Of each index."""
    name_of: Callable[[int, bytes], bytes] = field(init=False)
    """Returns the name of a block, given its group and hash."""

    def __post_init__(self) -> None:
        self.usages = [TierUsage(unit) for unit in self.unit_bytes]
        for index, usage in zip(self.indexes, self.usages, strict=True):
            index.usage = usage

    def index(self, group: int) -> TierIndex:
        return self.indexes[group if len(self.indexes) > 1 else 0]

    def usage(self, group: int) -> TierUsage:
        return self.usages[group if len(self.usages) > 1 else 0]

    def takes(self, block: TierBlock) -> bool:
        """Return whether a command writes this copy of a block, or reads it."""
        return {"host": block.slot >= 0, "disk": block.on_disk, "store": block.in_store}[self.name]

    def has(self, group: int, name: bytes) -> bool:
        return not self.rests and self.index(group).has(name)

    def has_all(self, keys: Sequence[tuple[int, bytes]]) -> bool:
        """Return whether all of these blocks, given by group and hash, can be loaded."""
        return all(self.has(group, self.name_of(group, block_hash)) for group, block_hash in keys)

    def hold(self, keys: Sequence[tuple[int, bytes]], account: BlockAccount) -> None:
        """Keep blocks until `unhold`; all of them are here. account: pays for that."""
        for group, block_hash in keys:
            name, index = self.name_of(group, block_hash), self.index(group)
            index.hold(name)
            self.usage(group).taken(account, name, index.size(name))

    def unhold(self, keys: Sequence[tuple[int, bytes]], account: BlockAccount) -> None:
        for group, block_hash in keys:
            name = self.name_of(group, block_hash)
            self.index(group).unhold(name)
            self.usage(group).returned(account, name)

    def byte_time(self, keys: Sequence[tuple[int, bytes]], account: BlockAccount) -> int:
        """Return what an account has to pay until now for the blocks that it holds, in bytes times nanoseconds."""
        held = sum(self.usage(group).per_reference(self.name_of(group, block_hash)) for group, block_hash in keys)
        return account.block_ns + held

    def holds(self, keys: Sequence[tuple[int, bytes]]) -> bool:
        """Return whether these held blocks are still here."""
        return all(self.name_of(group, block_hash) in self.index(group).held for group, block_hash in keys)

    @property
    def has_holds(self) -> bool:
        """Whether holds keep any of its blocks."""
        return any(index.held for index in self.indexes)

    def fits(self, counts: Sequence[int], share: float) -> bool:
        """Return whether `counts` blocks of the KV cache groups take at most this share of the tier."""
        needed: Counter[int] = Counter()
        for group, count in enumerate(counts):
            needed[group if len(self.indexes) > 1 else 0] += count * self.sizes[group]
        return all(size <= share * self.indexes[i].capacity for i, size in needed.items())

    def failed(self, kind: str, count: int, now: float) -> None:
        self.errors[kind] += count
        self.rests, self.rests_until = True, max(self.rests_until, now + REST_S)

    def quarantine(self) -> None:
        """Neither read nor write it any more, since a block of it was wrong."""
        self.errors["different"] += 1
        self.rests, self.rests_until = True, float("inf")

    def stats(self) -> TierStats:
        return TierStats(
            used_bytes=self._total([index.used for index in self.indexes]),
            total_bytes=self._total([index.capacity for index in self.indexes]),
            blocks=sum(map(len, self.indexes)),
            read_bytes=self.moved["read"],
            write_bytes=self.moved["write"],
            read_s=self.seconds["read"],
            write_s=self.seconds["write"],
            errors=dict(self.errors),
            gib_s={
                "holds": sum(usage.byte_ns - usage.cached_byte_ns for usage in self.usages) / GIB_NS,
                "cache": sum(usage.cached_byte_ns for usage in self.usages) / GIB_NS,
            },
        )

    def _total(self, sizes: list[int]) -> int:
        return sum(size * unit for size, unit in zip(sizes, self.unit_bytes, strict=True))


class NoHashes:
    """Stand-in for TierHashes in an engine without tiers. Has the methods that a publisher calls."""

    def track(self, enabled: bool) -> None:
        pass

    def all(self) -> list[bytes]:
        return []

    def gone(self, evicted: list[bytes]) -> list[bytes]:
        return evicted


class TierHashes:
    """Hashes of the first KV cache group's blocks that are in some tier, as far as they are known. Of a block left by
    an earlier start, only the name is known until the block is used."""

    def __init__(self, pool: BlockPool, tiers: Sequence[Tier], name_of: Callable[[int, bytes], bytes]):
        """pool: block pool of the first KV cache group."""
        self._pool, self._tiers, self.name_of = pool, tiers, name_of
        self._hashes: dict[bytes, bytes] = {}  # by name
        self._gone: list[bytes] | None = None  # since the last call of `gone`

    def track(self, enabled: bool) -> None:
        """Start or stop recording which blocks leave the tiers."""
        self._gone = [] if enabled else None

    def all(self) -> list[bytes]:
        return list(self._hashes.values())

    def add(self, group: int, name: bytes, block_hash: bytes) -> None:
        if not group:
            self._hashes[name] = block_hash

    def gone(self, evicted: list[bytes]) -> list[bytes]:
        """Return the hashes of blocks that are neither on the device nor in a tier any more. Considers the hashes
        `evicted` from the device, and those that have left the tiers since the last call."""
        left, self._gone = self._gone or [], []
        return [
            each
            for each in dict.fromkeys([*evicted, *left])
            if not self._pool.has(each) and self.name_of(0, each) not in self._hashes
        ]

    def update(self) -> None:
        """Forget the blocks that have left all tiers."""
        for index in (index for tier in self._tiers for index in tier.indexes):
            removed, index.removed = index.removed, []
            for name in removed:
                if name in self._hashes and not any(tier.index(0).knows(name) for tier in self._tiers):
                    block_hash = self._hashes.pop(name)
                    if self._gone is not None:
                        self._gone.append(block_hash)


def tiers_of(tiers: Sequence[Tier], blocks: Sequence[TierBlock]) -> list[Tier]:
    """Return the tiers that a command with these blocks writes or reads, the slowest last."""
    return [tier for tier in tiers if any(tier.takes(block) for block in blocks)]
