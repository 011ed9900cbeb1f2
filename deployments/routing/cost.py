"""What it costs to send a request to an engine, in KV blocks of prompt that have to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.wire.messages import EngineLoad


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """What is to be sent. keys: of its full blocks (prefix_index.py), in order. session: requests of one session should
    meet in one engine; empty for none."""

    request_id: str
    num_tokens: int
    keys: Sequence[int]
    session: str = ""


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """An engine as its router sees it. cached: blocks of the prompt, from the first on, that it has or will have."""

    engine: str
    load: EngineLoad
    cached: int


@dataclass(frozen=True, slots=True)
class RoutingCost:
    """decode:  prefix_weight * uncached blocks + queued blocks + running_weight * blocks in use
    prefill: the same with a running_weight of 0, since blocks that only wait to be read slow nothing down

    Queued blocks are prompt blocks that others still have to have computed there, so they count as much as the
    request's own. Blocks in use are read by every step of the answers to come, which costs less than computing them.
    """

    block_size: int
    prefix_weight: float
    running_weight: float

    def total(self, prompt: PromptDigest, candidate: EngineCandidate) -> float:
        return self.prefix_weight * self.uncached(prompt, candidate) + self.load(candidate)

    def uncached(self, prompt: PromptDigest, candidate: EngineCandidate) -> float:
        """Blocks, and a part of one."""
        return self.uncached_tokens(prompt, candidate) / self.block_size

    def uncached_tokens(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        return prompt.num_tokens - self.cached_tokens(prompt, candidate)

    def cached_tokens(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        """At least one token is always computed."""
        return min(candidate.cached, (prompt.num_tokens - 1) // self.block_size) * self.block_size

    def new_blocks(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        return -(-self.uncached_tokens(prompt, candidate) // self.block_size)

    def load(self, candidate: EngineCandidate) -> float:
        load = candidate.load
        return load.queued_tokens / self.block_size + self.running_weight * load.blocks_used

    def would_wait(self, prompt: PromptDigest, candidate: EngineCandidate) -> bool:
        """For a slot or for blocks, which takes until another request has ended: longer than computing any prompt."""
        load = candidate.load
        no_slot = load.slots > 0 and load.sequences >= load.slots
        return no_slot or 0 < load.blocks_total < load.blocks_used + self.new_blocks(prompt, candidate)

    def overloaded(self, prompt: PromptDigest, candidate: EngineCandidate, others: Sequence[EngineCandidate]) -> bool:
        """The request is better off elsewhere even if all of its prompt is cached here and nothing of it there: it
        would have to wait here and not there, or more work is ahead of it here than its whole prompt is there."""
        with_capacity = [other for other in others if not self.would_wait(prompt, other)]
        if self.would_wait(prompt, candidate) and with_capacity:
            return True
        whole = self.prefix_weight * prompt.num_tokens / self.block_size
        return any(self.load(candidate) > whole + self.load(other) for other in with_capacity)
