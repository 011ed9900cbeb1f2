"""Engines for tests of routing: block pools whose prompts are computed at once, and what they say about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.routing.cost import Prompt
from deployments.routing.prefix_index import keys_of
from engine.core.block_pool import BlockPool
from engine.wire.block_hash import block_hashes
from engine.wire.messages import EngineLoad, EngineUpdate

BLOCK = 4


def prompt(request_id: str, tokens: list[int], session: str = "") -> Prompt:
    return Prompt(request_id, len(tokens), keys_of(block_hashes(tokens, BLOCK)), session)


def names(tokens: list[int]) -> list[bytes]:
    joined = block_hashes(tokens, BLOCK)
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]


@dataclass
class PoolEngine:
    """An engine that is only a block pool. held: blocks of the requests that run. queued: tokens that wait, by request.

    taken, settled: what its next news will say.
    """

    name: str
    num_blocks: int = 64
    slots: int = 8
    pool: BlockPool = field(init=False)
    held: dict[str, list[int]] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    settled: list[tuple[str, int]] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK)
        self.pool.track(True)

    def take(self, request_id: str, tokens: list[int]) -> None:
        self.queued[request_id] = len(tokens)
        self.taken.append(request_id)

    def compute(self, request_id: str, tokens: list[int]) -> bool:
        """Its whole prompt, and nothing is generated yet. False if there are no blocks for it."""
        hashes = names(tokens)[: (len(tokens) - 1) // BLOCK]
        matched = self.pool.match(hashes)
        blocks = self.pool.reserve(matched, self.pool.blocks_for(len(tokens)) - len(matched))
        if blocks is None:
            return False
        del self.queued[request_id]
        self.held[request_id] = [
            self.pool.publish(block, name) for block, name in zip(blocks, names(tokens), strict=False)
        ] + blocks[len(names(tokens)) :]
        self.settled.append((request_id, len(matched) * BLOCK))
        return True

    def end(self, request_id: str) -> None:
        self.pool.release(self.held.pop(request_id, []))
        if self.queued.pop(request_id, None) is not None:
            self.settled.append((request_id, -1))

    def load(self) -> EngineLoad:
        sequences = len(self.held) + len(self.queued)
        return EngineLoad(sequences, sum(self.queued.values()), self.pool.num_used, self.slots, self.num_blocks)

    def news(self) -> EngineUpdate:
        self.number += 1
        stored, removed = self.pool.take_changes()
        taken, self.taken, settled, self.settled = self.taken, [], self.settled, []
        return EngineUpdate(
            engine_id=self.name,
            number=self.number,
            snapshot=False,
            load=self.load(),
            stored=b"".join(stored),
            removed=b"".join(removed),
            taken=taken,
            settled=settled,
        )

    def snapshot(self) -> EngineUpdate:
        return EngineUpdate(
            engine_id=self.name,
            number=self.number,
            snapshot=True,
            load=self.load(),
            stored=b"".join(self.pool.names()),
            removed=b"",
            taken=[*self.held, *self.queued],
            settled=[],
        )

    def cached(self, tokens: list[int]) -> int:
        """Blocks of this prompt that it has."""
        return len(self.pool.match(names(tokens)))
