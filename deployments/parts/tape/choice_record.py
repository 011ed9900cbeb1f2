"""What a router knew when it chose an engine, and what it chose: enough to choose again. It says nothing of the prompt
but its length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from deployments.routing.config import PolicyName, Role
from deployments.routing.cost import EngineCandidate, RoutingCost
from deployments.routing.policies import make_policy
from deployments.routing.prompt_digest import PromptDigest
from deployments.routing.ranking import Ranker
from engine.wire.stats.engine_stats import EngineLoad


class RecordedEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine as the router knew it."""

    sequences: int
    queued_tokens: int
    blocks_used: int
    slots: int
    blocks_total: int
    queued_embeds: int
    cached: int
    holds_adapter: bool

    @classmethod
    def of(cls, candidate: EngineCandidate) -> RecordedEngine:
        load = candidate.load
        return cls(
            load.sequences, load.queued_tokens, load.blocks_used, load.slots, load.blocks_total, load.queued_embeds,
            candidate.cached, candidate.holds_adapter,
        )  # fmt: skip

    def candidate(self, engine: str) -> EngineCandidate:
        load = EngineLoad(
            self.sequences, self.queued_tokens, self.blocks_used, self.slots, self.blocks_total, self.queued_embeds
        )
        return EngineCandidate(engine, load, self.cached, self.holds_adapter)


class RecordedChoice(msgspec.Struct, frozen=True, array_like=True):
    at: float
    """Seconds since 1970."""
    request_id: str
    """Of the attempt; for a prompt that another engine computes, the id of the handoff."""
    num_tokens: int
    num_blocks: int
    """Full blocks of the prompt whose hashes the router compared."""
    images: tuple[tuple[int, int], ...]
    has_session: bool
    has_adapter: bool
    engines: list[str]
    """Engines from which it chose."""
    unhealthy: list[str]
    """Engines that came last, because they had just lost a request or are about to stop."""
    home: str | None
    """Engine that held a part of the prompt for a client."""
    memory: str
    """What the policy remembered of earlier choices."""
    drawn: list[int]
    """Random numbers."""
    orders: list[list[str]]
    """Orders of equal engines that depend on the prompt or the session."""
    known: dict[str, RecordedEngine]
    """The engines at which the policy looked."""
    ranked: list[str]
    """The engines that could take the request, best first."""
    reason: str
    cached_tokens: int
    holder: str
    """Engine from which the chosen one may fetch KV; empty for none."""
    moves: bool
    """Whether another engine had been chosen for it before, and did not take it."""


class RouterTape(msgspec.Struct, frozen=True, kw_only=True):
    """The newest choices of one router."""

    router: str
    """Id of the ingress, or of the engine whose prompts it sends elsewhere."""
    role: Role
    policy: PolicyName
    cost: RoutingCost
    choices: list[bytes]
    """A RecordedChoice each, in msgpack."""

    def read(self) -> list[RecordedChoice]:
        decode = msgspec.msgpack.Decoder(RecordedChoice).decode
        return [decode(choice) for choice in self.choices]


@dataclass(frozen=True, slots=True)
class ChosenAgain:
    ranked: list[str]
    reason: str
    cached_tokens: int

    def differs(self, then: RecordedChoice) -> str:
        """Return what differs from the recorded choice; empty for nothing."""
        if self.ranked != then.ranked:
            return f"the order is {', '.join(self.ranked)}; it was {', '.join(then.ranked)}"
        if (self.reason, self.cached_tokens) != (then.reason, then.cached_tokens):
            was = f"{then.reason}, {then.cached_tokens} tokens cached"
            return f"the reason is {self.reason}, {self.cached_tokens} tokens cached; it was {was}"
        return ""


class RecordedNumbers:
    def __init__(self, numbers: Iterable[int]):
        self._numbers = iter(numbers)

    def randrange(self, start: int, stop: int | None = None) -> int:
        return next(self._numbers)


def choose_again(tape: RouterTape, choice: RecordedChoice) -> ChosenAgain:
    """Let the same code choose again. Raises LookupError or StopIteration if it asks for more than it did then."""
    orders = iter(choice.orders)
    policy = make_policy(tape.policy, tape.cost, RecordedNumbers(choice.drawn), lambda key, engines: next(orders))
    policy.memory = choice.memory
    ranking = Ranker(policy, tape.cost, lambda key, engines: next(orders))
    prompt = prompt_of(choice)

    def lookup(engine: str) -> EngineCandidate:
        return choice.known[engine].candidate(engine)

    ranked, reason = ranking.rank(prompt, choice.engines, choice.home, lookup)
    return ChosenAgain(ranked, reason, tape.cost.cached_tokens(prompt, lookup(ranked[0])))


def prompt_of(choice: RecordedChoice) -> PromptDigest:
    return PromptDigest(
        choice.request_id,
        choice.num_tokens,
        range(choice.num_blocks),
        "a session" if choice.has_session else "",
        choice.images,
        "an adapter" if choice.has_adapter else "",
    )
