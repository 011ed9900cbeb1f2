"""Engines for tests of routing: block pools whose prompts are computed at once, and what they say about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.routing.prefix_index import block_keys
from deployments.routing.prompt_digest import PromptDigest
from engine.core.block_pool import BlockPool
from engine.serving.hash_changes import HashChanges
from engine.wire import block_hash
from engine.wire.messages import EngineUpdate
from engine.wire.stats.engine_stats import EngineLoad

BLOCK = 4


def prompt(request_id: str, tokens: list[int], session: str = "") -> PromptDigest:
    return PromptDigest(request_id, len(tokens), block_keys(block_hash.block_hashes(tokens, BLOCK)), session)


def block_hashes(tokens: list[int]) -> list[bytes]:
    joined = block_hash.block_hashes(tokens, BLOCK)
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]


@dataclass
class PoolEngine:
    """An engine that is only a block pool. held: blocks of the requests that run. queued: tokens that wait, by request.

    admitted, prefilled: what its next update will say.
    """

    name: str
    num_blocks: int = 64
    slots: int = 8
    pool: BlockPool = field(init=False)
    changes: HashChanges = field(default_factory=HashChanges)
    held: dict[str, list[int]] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    prefilled: list[tuple[str, int]] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK)
        self.pool.observers.append(self.changes)

    def take(self, request_id: str, tokens: list[int]) -> None:
        self.queued[request_id] = len(tokens)
        self.admitted.append(request_id)

    def compute(self, request_id: str, tokens: list[int]) -> bool:
        """Its whole prompt, and nothing is generated yet. False if there are no blocks for it."""
        hashes = block_hashes(tokens)[: (len(tokens) - 1) // BLOCK]
        matched = self.pool.match(hashes)
        blocks = self.pool.reserve(matched, self.pool.blocks_for(len(tokens)) - len(matched))
        if blocks is None:
            return False
        del self.queued[request_id]
        self.held[request_id] = [
            self.pool.cache_block(block, name) for block, name in zip(blocks, block_hashes(tokens), strict=False)
        ] + blocks[len(block_hashes(tokens)) :]
        self.prefilled.append((request_id, len(matched) * BLOCK))
        return True

    def serve(self, request_id: str, tokens: list[int]) -> None:
        """Take a request for which there are blocks, and compute its prompt."""
        self.take(request_id, tokens)
        assert self.compute(request_id, tokens)

    def end(self, request_id: str) -> None:
        self.pool.release(self.held.pop(request_id, []))
        if self.queued.pop(request_id, None) is not None:
            self.prefilled.append((request_id, -1))

    def load(self) -> EngineLoad:
        sequences = len(self.held) + len(self.queued)
        return EngineLoad(sequences, sum(self.queued.values()), self.pool.num_used, self.slots, self.num_blocks)

    def update(self) -> EngineUpdate:
        self.number += 1
        stored, removed = self.changes.take()
        admitted, self.admitted, prefilled, self.prefilled = self.admitted, [], self.prefilled, []
        return EngineUpdate(
            engine_id=self.name,
            number=self.number,
            snapshot=False,
            load=self.load(),
            stored=b"".join(stored),
            removed=b"".join(removed),
            admitted=admitted,
            prefilled=prefilled,
        )

    def snapshot(self) -> EngineUpdate:
        return EngineUpdate(
            engine_id=self.name,
            number=self.number,
            snapshot=True,
            load=self.load(),
            stored=b"".join(self.pool.block_hashes()),
            removed=b"",
            admitted=[*self.held, *self.queued],
            prefilled=[(request_id, -1) for request_id in self.held],
        )

    def cached(self, tokens: list[int]) -> int:
        """Blocks of this prompt that it has."""
        return len(self.pool.match(block_hashes(tokens)))
