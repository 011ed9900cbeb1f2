"""How often a request finds its adapter in a slot: the router's own choices, by policy, for engines that are modelled.

    python -m benchmarks.adapter_routing

Two engines of 16 slots, and requests for 200 adapters by Zipf's law, at a load that keeps some sequences running. An
engine loads what is missing and drops what was used least recently; loading delays the first token by --load-s. Real is
`Balancer`; modelled are the engines, whose prompts take --prompt-s and whose answers --decode-s. No clock: time is the
model's.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import get_args

from deployments.routing.balancer import Balancer
from deployments.routing.config import PolicyName, RoutingConfig
from deployments.routing.prompt_digest import PromptDigest
from engine.wire.messages import EngineUpdate
from engine.wire.stats.engine_stats import EngineLoad

REPORT_S = 0.1  # engine/serving/kv_events.py
PROMPT_TOKENS, BLOCK_SIZE, BLOCKS = 256, 16, 24  # BLOCKS: of prompt and answer


@dataclass
class Engine:
    """Slots, and one prompt after the other."""

    name: str
    slots: int
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    running: list[float] = field(default_factory=list)  # ends, as a heap
    free_at: float = 0.0
    admitted: list[str] = field(default_factory=list)
    number: int = 0

    def take(self, adapter: str, now: float, args: argparse.Namespace) -> tuple[bool, float]:
        """Return whether the adapter was there, and the seconds to the first token."""
        hit = adapter in self.adapters
        self.adapters[adapter] = None
        self.adapters.move_to_end(adapter)
        if len(self.adapters) > self.slots:
            self.adapters.popitem(last=False)
        begins = max(self.free_at, now if hit else now + args.load_s)
        self.free_at = begins + args.prompt_s
        heapq.heappush(self.running, self.free_at + args.decode_s)
        return hit, self.free_at - now

    def report(self, now: float, args: argparse.Namespace) -> EngineUpdate:
        while self.running and self.running[0] <= now:
            heapq.heappop(self.running)
        queued = max(0.0, self.free_at - now) / args.prompt_s * PROMPT_TOKENS
        load = EngineLoad(
            sequences=len(self.running),
            queued_tokens=round(queued),
            blocks_used=len(self.running) * BLOCKS,
            slots=256,
            blocks_total=100_000,
            adapters=tuple(self.adapters),
        )
        self.number += 1
        admitted, self.admitted = self.admitted, []
        return EngineUpdate(
            engine_id=self.name, number=self.number, snapshot=self.number == 1, load=load, stored=b"", removed=b"",
            admitted=admitted, prefilled=[(name, 0) for name in admitted],
        )  # fmt: skip


def run(policy: PolicyName, adapter_weight: float, seed: int, args: argparse.Namespace) -> tuple[float, list[float]]:
    """Return the share of hits, and the times to the first token, of the requests after the first fifth."""
    rng = random.Random(seed)
    router = Balancer(RoutingConfig(policy=policy, adapter_weight=adapter_weight), "decode", BLOCK_SIZE, rng)
    engines = {f"engine-{i}": Engine(f"engine-{i}", args.slots) for i in range(args.engines)}
    weights = [1 / rank**args.exponent for rank in range(1, args.adapters + 1)]
    now, reported, results = 0.0, 0.0, []
    for i in range(args.requests):
        now += rng.expovariate(args.rate)
        if now >= reported + REPORT_S:
            reported = now
            for engine in engines.values():
                router.update(engine.report(now, args))
        (adapter,) = rng.choices(range(args.adapters), weights)
        prompt = PromptDigest(f"r{i}", PROMPT_TOKENS, (), adapter=f"adapter-{adapter}")
        chosen = engines[router.choose(prompt, list(engines)).engines[0]]
        chosen.admitted.append(prompt.request_id)
        results.append(chosen.take(prompt.adapter, now, args))
    steady = results[len(results) // 5 :]
    return sum(hit for hit, _ in steady) / len(steady), [seconds for _, seconds in steady]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 200), ("engines", 2), ("slots", 16), ("requests", 20_000), ("seeds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, seconds in (("exponent", 1.0), ("rate", 12.0), ("load-s", 0.1), ("prompt-s", 0.05), ("decode-s", 2.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds)
    args = parser.parse_args()
    print("| policy | adapter_weight | hits | first token, mean ms | P99 ms |\n| --- | --- | --- | --- | --- |")
    weight = RoutingConfig().adapter_weight
    for policy, adapter_weight in [("prefix_aware", weight), ("prefix_aware", 0.0), ("round_robin", weight)]:
        assert policy in get_args(PolicyName)
        runs = [run(policy, adapter_weight, seed, args) for seed in range(args.seeds)]  # type: ignore[arg-type]
        hits = [share for share, _ in runs]
        mean = statistics.fmean(1000 * statistics.fmean(times) for _, times in runs)
        p99 = statistics.fmean(1000 * statistics.quantiles(times, n=100)[-1] for _, times in runs)
        spread = f"{statistics.fmean(hits):.1%} ({min(hits):.1%} to {max(hits):.1%})"
        print(f"| {policy} | {adapter_weight:g} | {spread} | {mean:.0f} | {p99:.0f} |")


if __name__ == "__main__":
    main()
