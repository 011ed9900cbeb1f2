"""What engines cost, by what they spend their time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.lab.simulator.billing.meter import EngineMeter
from deployments.billing.prices import Prices
from engine.wire.parts.costs import SequenceCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What engines cost while they served some requests: money, in the currency of the prices.

    All hours of the engines count. Costs per request and per token include the time in which engines were idle or
    repeated work, in proportion.
    """

    per_hour: float
    per_request: float
    per_million_prompt_tokens: float  #: cached ones count too
    per_million_output_tokens: float
    billed_per_hour: float  #: what these requests have to pay by the price list
    saved_per_hour: float | None = None
    """What an autoscaled cluster saves against one that always has the most replicas; None without autoscaling."""
    wasted: dict[str, float]
    """Fraction of the engines' time that advanced no request, by what it was spent on (CostLine), or `starting`."""

    @classmethod
    def of(
        cls,
        prices: Prices,
        meters: Sequence[EngineMeter],
        *,
        engine_s: float,
        starting_s: float = 0.0,
        most_engines: int | None = None,
        seconds: float,
        requests: int,
        prompt_tokens: int,
        output_tokens: int,
    ) -> Costs:
        """engine_s: seconds of all engines together, without the time in which they started. most_engines: most that
        were up at a time, if their number changed. seconds: duration of it all."""
        lines: dict[str, float] = {line: sum(m.ledger.seconds[line] for m in meters) for line in meters[0].ledger.ns}
        used_s, prompt_s = lines.pop("requests"), sum(meter.prompt_ns for meter in meters) / 1e9
        lines["idle"] = max(0.0, engine_s - used_s - sum(s for line, s in lines.items() if line != "idle"))
        paid_s, hours = engine_s + starting_s, seconds / 3600
        money = prices.of(SequenceCost(paid_s, 0.0, 0.0))
        of_prompts = prompt_s / used_s if used_s else 0.0
        kv_gib_s = sum(meter.kv_gib_s for meter in meters)
        always = None if most_engines is None else most_engines * prices.engine_hour
        return cls(
            per_hour=money / hours,
            per_request=money / max(1, requests),
            per_million_prompt_tokens=1e6 * money * of_prompts / max(1, prompt_tokens),
            per_million_output_tokens=1e6 * money * (1 - of_prompts) / max(1, output_tokens),
            billed_per_hour=prices.of(SequenceCost(used_s, 0.0, kv_gib_s)) / hours,
            saved_per_hour=None if always is None else always - money / hours,
            wasted={line: s / paid_s for line, s in {**lines, "starting": starting_s}.items()},
        )
