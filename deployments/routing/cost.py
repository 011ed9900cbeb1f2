"""The cost of sending a prompt to an engine, in KV blocks of prompt that have to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.routing.routing_context import PromptDigest
from engine.wire.messages import EngineLoad


@dataclass(slots=True)  # not frozen: a choice makes one per engine, and that takes twice as long
class EngineCandidate:
    """One engine, seen with one prompt in mind."""

    engine: str
    load: EngineLoad
    cached: int  #: leading blocks of the prompt that it has or will have


@dataclass(frozen=True, slots=True)
class RoutingCost:
    """decode:  prefix_weight * uncached blocks + queued blocks + running_weight * blocks in use
    prefill: the same with a running_weight of 0, since blocks that only wait to be read slow nothing down

    Queued blocks are prompt blocks of other requests that the engine still has to compute, so they count as much as
    the request's own. Blocks in use are read by every step of the answers to come, which costs less than computing
    them.

    Each embedding of an image that is still to be made counts as a token of a prompt, in addition to its placeholder.
    """

    block_size: int
    prefix_weight: float
    running_weight: float

    def total(self, prompt: PromptDigest, candidate: EngineCandidate) -> float:
        return self.prefix_weight * self.uncached(prompt, candidate) + self.load(candidate)

    def uncached(self, prompt: PromptDigest, candidate: EngineCandidate) -> float:
        """Blocks, with the fraction of the last one. An embedding to be made counts as one token more."""
        tokens = self.uncached_tokens(prompt, candidate) + self.uncached_embeds(prompt, candidate)
        return tokens / self.block_size

    def uncached_tokens(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        return prompt.num_tokens - self.cached_tokens(prompt, candidate)

    def uncached_embeds(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        """Embeddings of the images that do not end in cached blocks. The encoder cache may still have them."""
        if not prompt.images:
            return 0
        cached = self.cached_tokens(prompt, candidate)
        return sum(embeds for end, embeds in prompt.images if end > cached)

    def cached_tokens(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        """Tokens that need not be computed; at least one always is."""
        return min(candidate.cached, (prompt.num_tokens - 1) // self.block_size) * self.block_size

    def new_blocks(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        return -(-self.uncached_tokens(prompt, candidate) // self.block_size)

    def load(self, candidate: EngineCandidate) -> float:
        load = candidate.load
        queued = load.queued_tokens + load.queued_embeds
        return queued / self.block_size + self.running_weight * load.blocks_used

    def would_wait(self, prompt: PromptDigest, candidate: EngineCandidate) -> bool:
        """Return whether the request would wait for a slot or for blocks until another request has ended: longer than
        computing any prompt takes."""
        load = candidate.load
        no_slot = load.slots > 0 and load.sequences >= load.slots
        return no_slot or 0 < load.blocks_total < load.blocks_used + self.new_blocks(prompt, candidate)

    def overloaded(self, prompt: PromptDigest, candidate: EngineCandidate, others: Sequence[EngineCandidate]) -> bool:
        """Return whether the request is better off elsewhere, even with its whole prompt cached here and none there.

        It would have to wait here and not there, or more work is ahead of it here than its whole prompt is there.
        """
        with_capacity = [other for other in others if not self.would_wait(prompt, other)]
        if self.would_wait(prompt, candidate) and with_capacity:
            return True
        whole = self.prefix_weight * prompt.num_tokens / self.block_size
        return any(self.load(candidate) > whole + self.load(other) for other in with_capacity)
