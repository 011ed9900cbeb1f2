"""Where a prompt is computed: here, or by an engine of the prefill pool. Pure Python: no clock, no socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.config import HandoffConfig
from engine.core.step_cost import LinearCost, StepCost
from engine.wire.messages import PrefillReplica

MIN_TOKENS = 32  # below, a prompt rides along with the decodes of one step
LINK_MEMORY = 100.0  # handoffs after which one counts 1/e
FORGET = 0.02  # of what the link has cost, per prompt that stays here because of it: it will be tried again
LINK_PRIOR_S = 0.01
SWITCH_GAIN = 0.1  # the other place has to be better by this share, or the choice would flap


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    remote: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """What is known of a prompt when it is its turn. cached: leading tokens that this engine has. local_only: why it
    can only be computed here; empty if it may go."""

    tokens: int
    cached: int
    local_only: str = ""


@dataclass(frozen=True, slots=True)
class LocalLoad:
    """Of this engine. queued: prompt tokens of others that come first. receiving: prompt tokens that other engines are
    computing for it. decoding: requests that a prompt computed here would hold up."""

    queued: int = 0
    receiving: int = 0
    decoding: int = 0


class RemotePrefillPolicy:
    """Weighs, for one prompt, the seconds that it costs everyone if it is computed here against those there.

    here:  queue + compute + what it holds up each request that is decoding
    there: queue + compute + the transfer as far as it does not hide behind the computing (learned from every handoff)
    """

    def __init__(
        self, config: HandoffConfig, step_cost: StepCost, quarantined: Callable[[], Collection[str]] = lambda: ()
    ):
        """quarantined: ids of engines that should get no prefill requests for now."""
        self.config = config
        self.step_cost = step_cost
        self._quarantined = quarantined
        self.link_cost = LinearCost(LINK_MEMORY, LINK_PRIOR_S)
        self.replicas: list[PrefillReplica] | None = None  # None: nothing was heard yet
        self.decisions: Counter[tuple[str, str]] = Counter()
        self._last_remote = True
        self._hit_share = 0.0  # of a prompt's tokens, as far as prefill engines had them cached of late

    def decide(self, prompt: PendingPrompt, load: LocalLoad) -> PrefillDecision:
        """Has no effect; tell `count` when it is carried out."""
        if prompt.local_only:
            return PrefillDecision(False, prompt.local_only)
        if self.config.policy == "never":
            return PrefillDecision(False, "policy")
        quarantined = self._quarantined()
        there = None if self.replicas is None else [r for r in self.replicas if r.engine_id not in quarantined]
        if not there and (there is not None or self.config.policy != "always"):
            return PrefillDecision(False, "quarantined" if self.replicas else "no_prefill_replica")
        if self.config.policy == "always" or there is None:
            return PrefillDecision(True, "policy")
        if prompt.tokens < MIN_TOKENS:
            return PrefillDecision(False, "short_prompt")
        if prompt.tokens - prompt.cached < MIN_TOKENS:
            return PrefillDecision(False, "cached")
        return self._weigh(prompt, load, there)

    def _weigh(self, prompt: PendingPrompt, load: LocalLoad, there: list[PrefillReplica]) -> PrefillDecision:
        missing = prompt.tokens - prompt.cached
        fixed, per_token = self.step_cost.coefficients
        here_s = fixed + per_token * (load.queued + missing * (1 + load.decoding))
        queued = max(min(r.queued_tokens for r in there), load.receiving / len(there))
        rates = [r.seconds_per_token or per_token for r in there]
        rate, start_s = sum(rates) / len(rates), max(r.seconds_per_step for r in there) or fixed
        queue_s = queued * rate
        if queue_s > here_s:
            return PrefillDecision(False, "saturated")
        compute_s = start_s + rate * prompt.tokens * (1 - self._hit_share)
        there_s = queue_s + compute_s + self.link_cost.of(missing)
        gain = 1 + SWITCH_GAIN if self._last_remote else 1 - SWITCH_GAIN
        return (
            PrefillDecision(True, "cheaper_remote")
            if there_s < here_s * gain
            else PrefillDecision(False, "cheaper_local")
        )

    def count(self, decision: PrefillDecision) -> None:
        self.decisions["remote" if decision.remote else "local", decision.reason] += 1
        if decision.reason in ("cheaper_remote", "cheaper_local"):
            self._last_remote = decision.remote
        if decision.reason == "cheaper_local":
            self.link_cost.forget(FORGET)

    def received(self, prompt: PendingPrompt, cached_there: int, seconds: float) -> None:
        """A handoff took `seconds` from the prefill request to the first token here."""
        self._hit_share += 0.1 * (cached_there / prompt.tokens - self._hit_share)
        rates = [r.seconds_per_token for r in self.replicas or [] if r.seconds_per_token]
        computed_s = (prompt.tokens - cached_there) * (min(rates) if rates else self.step_cost.coefficients[1])
        self.link_cost.observe(prompt.tokens - prompt.cached, max(0.0, seconds - computed_s))
