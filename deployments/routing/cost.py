"""Cost of sending a prompt to an engine, in KV blocks of prompt to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.routing.prompt_digest import PromptDigest
from engine.wire.stats.engine_stats import EngineLoad


@dataclass(slots=True)  # not frozen, which takes twice as long to make: a choice makes one per engine
class EngineCandidate:
    """One engine as a candidate for one prompt."""

    engine: str
    load: EngineLoad
    cached: int  #: number of leading blocks of the prompt that it has or will have
    holds_adapter: bool = True  #: it has the adapter of the prompt or will have it, or there is none


@dataclass(frozen=True, slots=True)
class RoutingCost:
    """Cost of a prompt on an engine, in blocks to compute:

    decode:  prefix_weight * uncached blocks + queued blocks + running_weight * blocks in use
             + adapter_weight where the adapter has to be loaded
    prefill: the same with a running_weight of 0, since no later step reads the blocks in use

    Queued blocks are prompt blocks of other requests that the engine still has to compute, so they count as much as the
    request's own. Blocks in use are read by every later decode step, which costs less than computing them. Each image
    embedding still to be made counts as one more token, besides its placeholder.
    """

    block_size: int
    prefix_weight: float
    running_weight: float
    adapter_weight: float = 0.0

    def total(self, prompt: PromptDigest, candidate: EngineCandidate) -> float:
        own = self.prefix_weight * self.uncached(prompt, candidate) + self.load(candidate)
        return own if candidate.holds_adapter else own + self.adapter_weight

    def uncached(self, prompt: PromptDigest, candidate: EngineCandidate) -> float:
        """Return the number of blocks to compute. A last block that is not full counts as a fraction. An embedding to
        make counts as one token."""
        tokens = self.uncached_tokens(prompt, candidate) + self.uncached_embeds(prompt, candidate)
        return tokens / self.block_size

    def uncached_tokens(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        return prompt.num_tokens - self.cached_tokens(prompt, candidate)

    def uncached_embeds(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        """Return the number of embeddings of images whose ends are not cached. The encoder cache may still have
        them."""
        if not prompt.images:
            return 0
        cached = self.cached_tokens(prompt, candidate)
        return sum(embeds for end, embeds in prompt.images if end > cached)

    def cached_tokens(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        """Return how many tokens need not be computed. The last one is always computed."""
        return min(candidate.cached, (prompt.num_tokens - 1) // self.block_size) * self.block_size

    def new_blocks(self, prompt: PromptDigest, candidate: EngineCandidate) -> int:
        return -(-self.uncached_tokens(prompt, candidate) // self.block_size)

    def load(self, candidate: EngineCandidate) -> float:
        load = candidate.load
        queued = load.queued_tokens + load.queued_embeds
        return queued / self.block_size + self.running_weight * load.blocks_used

    def would_wait(self, prompt: PromptDigest, candidate: EngineCandidate) -> bool:
        """Return whether the request would have to wait for a slot or blocks until another request ends. That takes
        longer than computing any prompt."""
        load = candidate.load
        no_slot = load.slots > 0 and load.sequences >= load.slots
        return no_slot or 0 < load.blocks_total < load.blocks_used + self.new_blocks(prompt, candidate)

    def overloaded(self, prompt: PromptDigest, candidate: EngineCandidate, others: Sequence[EngineCandidate]) -> bool:
        """Return whether the request is better served by one of `others`. For this comparison, the whole prompt counts
        as cached in this engine, and neither the prompt nor its adapter counts as present in the other.

        It is better served elsewhere if it would have to wait in this engine but not in another one, or if this engine
        has more work queued than another would have with the whole prompt added.
        """
        with_capacity = [other for other in others if not self.would_wait(prompt, other)]
        if self.would_wait(prompt, candidate) and with_capacity:
            return True
        whole = self.prefix_weight * prompt.num_tokens / self.block_size + (
            self.adapter_weight if prompt.adapter else 0
        )
        return any(self.load(candidate) > whole + self.load(other) for other in with_capacity)
