"""What requests and holds have cost. Pure Python."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.core.block_pool import BlockHolder
from engine.wire.handoff import NO_COST, PromptCost

COSTS = "costs"  # in `BlockHolder.of`


@dataclass(slots=True)
class BlockAccount:
    """Block time of one holder of references."""

    block_ns: int = 0
    """Blocks times nanoseconds. While the holder has references, BlockUsage.block_time gives the value instead."""


@dataclass(frozen=True, slots=True)
class KVCost:
    """What the KV blocks of a request had cost when it was summed the last time."""

    byte_ns: float = 0.0
    """Bytes times nanoseconds."""
    num_bytes: float = 0.0
    """Bytes that it used then; of a shared block, its share."""
    at_ns: int = 0
    """When that was."""
    next_sum: int = 0
    """Number of its tokens from which on it is summed again."""


@dataclass(slots=True)
class RequestCost:
    """What one request, or one hold, has cost its engine (CostLedger, BlockUsage)."""

    compute_ns: int = 0
    """Its share of the steps' time."""
    wasted_ns: int = 0
    """Its share of the steps' time for tokens that had been computed before."""
    remote_ns: int = 0
    """What other engines have spent on its prompt."""
    remote_byte_ns: float = 0.0
    """Bytes of KV cache that its prompt has used there, times nanoseconds."""
    coming: PromptCost = NO_COST
    """The same, of the engine that computes its prompt now, so far."""
    paid_ns: int = 0
    """What is paid of a prompt for another engine, although that has not read the KV."""
    known: int = 0
    """Leading tokens that have been computed before, here or in an engine that was lost."""
    reported: bool = False
    """Whether every delta tells the cost."""
    closed: bool = False
    """Whether the request has ended, so that it is charged no more."""
    blocks: dict[int, BlockAccount] = field(default_factory=lambda: defaultdict(BlockAccount))
    """Its block time, by KV cache group."""
    kv: KVCost = field(default_factory=KVCost)
    """The same in bytes, as it was reported."""
    tiers: dict[str, BlockAccount] = field(default_factory=lambda: defaultdict(BlockAccount))
    """Bytes times nanoseconds of holds in tiers, by tier (HoldTable)."""

    def told(self) -> tuple[PromptCost, float, int]:
        """Return what the engine that asked for the prompt is told: the last fields of ReportProgress."""
        return PromptCost(self.compute_ns, self.kv.byte_ns), self.kv.num_bytes, self.kv.at_ns

    def received(self, byte_ns: float) -> None:
        """Charge the request with what another engine has spent on its prompt, whose KV has come. byte_ns: as in
        Received."""
        self.remote_ns, self.remote_byte_ns = self.remote_ns + self.coming.compute_ns, self.remote_byte_ns + byte_ns
        self.coming = NO_COST

    def failed(self) -> None:
        """Charge nothing for a prompt that another engine has computed in vain."""
        self.coming = NO_COST


def cost_of(holder: BlockHolder) -> RequestCost:
    """Return the account of a request or a hold, opened when it is first asked for."""
    cost: RequestCost | None = holder.of.get(COSTS)
    if cost is None:
        cost = holder.of[COSTS] = RequestCost()
    return cost
