"""Decides whether this engine or one of the prefill pool computes a prompt. Pure Python: no clock, no socket."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.costs.step_cost import LinearCost, StepCost
from engine.options.handoff import HandoffConfig
from engine.wire.parts.handoffs import PrefillReplica

MOVED = "moved"  # the engine that has computed the request holds its KV
MIN_TOKENS = 32  # a shorter prompt fits into a decode step at hardly any cost
LINK_MEMORY = 100.0  # handoffs after which an observation's weight is 1/e
FORGET = 0.02  # fraction of the learned link cost forgotten per prompt kept local, so that the link is tried again
LINK_PRIOR_S = 0.01
SWITCH_GAIN = 0.1  # fraction by which the other side must be better, so that the choice does not flap


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    remote: bool
    reason: str
    seconds: float | None = None
    """Time that another engine is expected to take; None if the decision does not depend on it."""

    @property
    def source(self) -> str:
        """Where the KV comes from if it is not computed here, as a phrase."""
        if self.reason == MOVED:
            return "to be read from the engine where it ran"
        return f"to be computed by a prefill engine: {self.reason}"


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """The next prompt to compute."""

    tokens: int
    cached: int  #: leading tokens that this engine has
    local_only: str = ""  #: reason why only this engine can compute it, or empty


@dataclass(frozen=True, slots=True)
class LocalLoad:
    """Load of this engine when a prompt's turn comes."""

    queued: int = 0  #: prompt tokens of other requests that are computed first
    receiving: int = 0  #: prompt tokens that other engines are computing for this one
    decoding: int = 0  #: requests that a prompt computed here would hold up


class RemotePrefillPolicy:
    """Compares what a prompt costs all requests, in seconds, when it is computed locally and remotely:

    local:  queue + compute + delay of every request that is decoding
    remote: queue + compute + the part of the transfer not hidden by computing (learned from every handoff)
    """

    def __init__(self, config: HandoffConfig, step_cost: StepCost):
        self.config = config
        self.step_cost = step_cost
        self.resting: list[str] = []  #: ids of engines that get no prefill requests for now
        self.link_cost = LinearCost(LINK_MEMORY, LINK_PRIOR_S)
        self.replicas: list[PrefillReplica] | None = None  # None until the first list comes
        self.decisions: Counter[tuple[str, str]] = Counter()
        self._last_remote = True
        self._remote_hit_rate = 0.0  # recent fraction of a prompt that prefill engines had cached

    def decide(self, prompt: PendingPrompt, load: LocalLoad) -> PrefillDecision:
        """Decide where to compute a prompt, without side effects. Call `count` when the decision is carried out."""
        if prompt.local_only:
            return PrefillDecision(False, prompt.local_only)
        if self.config.policy == "never":
            return PrefillDecision(False, "policy")
        available = None if self.replicas is None else [r for r in self.replicas if r.engine_id not in self.resting]
        if not available and (available is not None or self.config.policy != "always"):
            return PrefillDecision(False, "quarantined" if self.replicas else "no_prefill_replica")
        if self.config.policy == "always" or available is None:
            return PrefillDecision(True, "policy")
        if prompt.tokens < MIN_TOKENS:
            return PrefillDecision(False, "short_prompt")
        if prompt.tokens - prompt.cached < MIN_TOKENS:
            return PrefillDecision(False, "cached")
        return self._weigh(prompt, load, available)

    def _weigh(self, prompt: PendingPrompt, load: LocalLoad, replicas: list[PrefillReplica]) -> PrefillDecision:
        missing = prompt.tokens - prompt.cached
        fixed, per_token = self.step_cost.coefficients
        local_s = self.local_s(missing, load)
        queued = max(min(r.queued_tokens for r in replicas), load.receiving / len(replicas))
        rates = [r.seconds_per_token or per_token for r in replicas]
        rate, start_s = sum(rates) / len(rates), max(r.seconds_per_step for r in replicas) or fixed
        queue_s = queued * rate
        if queue_s > local_s:
            return PrefillDecision(False, "saturated")
        compute_s = start_s + rate * prompt.tokens * (1 - self._remote_hit_rate)
        remote_s = queue_s + compute_s + self.link_cost.of(missing)
        gain = 1 + SWITCH_GAIN if self._last_remote else 1 - SWITCH_GAIN
        remote = remote_s < local_s * gain
        return PrefillDecision(True, "cheaper_remote", remote_s) if remote else PrefillDecision(False, "cheaper_local")

    def local_s(self, tokens: int, load: LocalLoad) -> float:
        """Return what computing so many tokens of a prompt here is expected to cost all requests, in seconds."""
        fixed, per_token = self.step_cost.coefficients
        return fixed + per_token * (load.queued + tokens * (1 + load.decoding))

    def count(self, remote: bool, reason: str) -> None:
        self.decisions["remote" if remote else "local", reason] += 1
        if reason in ("cheaper_remote", "cheaper_local"):
            self._last_remote = remote
        if reason == "cheaper_local":
            self.link_cost.forget(FORGET)

    def received(self, prompt: PendingPrompt, remotely_cached: int, seconds: float) -> None:
        """Learn from a handoff: `seconds` passed from the prefill request to the arrival of the first token."""
        self._remote_hit_rate += 0.1 * (remotely_cached / prompt.tokens - self._remote_hit_rate)
        rates = [r.seconds_per_token for r in self.replicas or [] if r.seconds_per_token]
        computed_s = (prompt.tokens - remotely_cached) * (min(rates) if rates else self.step_cost.coefficients[1])
        self.link_cost.observe(prompt.tokens - prompt.cached, max(0.0, seconds - computed_s))
