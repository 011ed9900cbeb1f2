"""What the engines of a model are expected to take for a request, from the costs that they report. Pure: no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.wire.stats.engine_stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyForecast:
    """Costs and load of the engines of a model, as they have last reported them. Costs are 0 while unknown."""

    num_prompt_engines: int = 0
    """Engines that compute prompts: the prefill pool, or else the decode pool."""
    num_decode_engines: int = 0
    queued_tokens: int = 0
    """Prompt tokens that are still to be computed, in all engines."""
    cached_share: float = 0.0
    """Share of the prompt tokens that the prefix caches have had."""
    prompt_token_s: float = 0.0
    """Seconds of one engine for a prompt token."""
    step_s: float = 0.0
    """Seconds of a step that only decodes, without those for its sequences."""
    sequence_s: float = 0.0
    """Further seconds for each of its sequences."""

    @classmethod
    def of(cls, decode: Sequence[EngineStats], prefill: Sequence[EngineStats]) -> LatencyForecast:
        everywhere, prompts = [*decode, *prefill], prefill or decode
        queried = sum(stats.prefix_queried_tokens for stats in everywhere)
        return cls(
            num_prompt_engines=len(prompts),
            num_decode_engines=len(decode),
            queued_tokens=sum(stats.queued_tokens for stats in everywhere),
            cached_share=sum(stats.prefix_hit_tokens for stats in everywhere) / queried if queried else 0.0,
            prompt_token_s=_mean([stats.prompt_seconds_per_token for stats in prompts]),
            step_s=_mean([stats.decode_seconds_per_step for stats in decode]),
            sequence_s=_mean([stats.decode_seconds_per_sequence for stats in decode]),
        )

    def first_token_s(self, prompt_tokens: int, tokens_ahead: int) -> float | None:
        """Return the expected seconds from a request's start in the engines to its first token; None while unknown.

        tokens_ahead: prompt tokens of the requests that this ingress has sent and that have no token yet. Engines may
        know of more, from other ingresses, or of fewer, since their reports are late.
        """
        if not self.prompt_token_s or not self.num_prompt_engines:
            return None
        ahead = max(self.queued_tokens, tokens_ahead * (1 - self.cached_share)) / self.num_prompt_engines
        return self.prompt_token_s * (ahead + prompt_tokens * (1 - self.cached_share)) + self.step_s

    def per_token_s(self, running: int) -> float | None:
        """Return the expected seconds for each further token; None while unknown. running: sequences that run in all
        engines besides this one."""
        if not self.num_decode_engines or not self.step_s + self.sequence_s:
            return None
        return self.step_s + self.sequence_s * (1 + running / self.num_decode_engines)


def _mean(costs: Sequence[float]) -> float:
    known = [cost for cost in costs if cost > 0]
    return sum(known) / len(known) if known else 0.0
