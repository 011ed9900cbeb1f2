"""How many tokens of agents' prompts replicas find cached, against one replica whose cache never evicts anything.

python -m benchmarks.simulator.agents

The load is the tokens of the longest contexts of all sessions that are active at a time. The caches of all replicas
together hold a part of it, and a tier of host memory below each holds its share of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from benchmarks.command import JsonOption, print_report, run
from cluster.config.simulation_options import RouterName
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.cost_model import CARDS, MODELS, roofline
from cluster.lab.simulator.results import Report
from cluster.lab.simulator.spec import ClusterSpec, TierSpec
from cluster.lab.simulator.trace import Trace, make_trace
from cluster.terminal.tables import figure, make_table, show
from engine.config import EngineConfig
from engine.errors import InvalidParameter

NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class CachedShare:
    name: str
    cached: float  #: share of all prompt tokens
    from_tiers: float  #: share of all prompt tokens whose KV came from a tier
    first_token_p90_ms: float | None

    @classmethod
    def of(cls, name: str, report: Report, trace: Trace) -> CachedShare:
        loaded = 0 if report.tiers is None else report.tiers.loaded_tokens
        p90 = None if report.ttft_ms is None else report.ttft_ms.p90
        return cls(name, report.hit_rate, loaded / int(trace.prompt_tokens.sum()), p90)


@dataclass(frozen=True, slots=True)
class CachedReport:
    requests: int
    prompt_tokens: float  #: mean
    load: int  #: tokens of the active sessions
    replicas: int
    cache: int  #: tokens of a replica's KV cache
    shares: list[CachedShare]  #: the endless cache first

    @property
    def of_endless(self) -> float:
        """What the replicas with tiers have cached, as a share of what the endless cache has."""
        return self.shares[-1].cached / self.shares[0].cached


def tokens_at_a_time(trace: Trace, sessions: int) -> int:
    """Return the tokens of so many sessions with the mean of their longest contexts, those of subagents included."""
    longest: dict[tuple[int, int], int] = {}
    for turn, tokens in zip(trace.turns or [], (trace.prompt_tokens + trace.output_tokens).tolist(), strict=True):
        agent = turn.session, turn.agent
        longest[agent] = max(longest.get(agent, 0), tokens)
    drawn = len({session for session, _ in longest})
    return min(sessions, drawn) * sum(longest.values()) // drawn


def measure(
    trace: Trace, sessions: int, replicas: int, overcommit: float, block_size: int, router: RouterName
) -> CachedReport:
    """overcommit: tokens of the load per token that fits the caches of all replicas."""
    model, card = MODELS["llama-3.1-8b"], CARDS["h100"]
    load = tokens_at_a_time(trace, sessions)
    cache = int(load / overcommit / replicas)
    if cache <= trace.longest:
        raise InvalidParameter("sessions", sessions, f"more, so that a cache ({cache} tokens) fits {trace.longest}")
    config = EngineConfig(block_size=block_size, max_num_batched_tokens=8192, max_num_seqs=256, max_waiting=NO_LIMIT)
    endless = ClusterSpec(
        replicas=1,
        engine=config,
        cost=roofline(model, card),
        num_blocks=int(trace.prompt_tokens.sum() + trace.output_tokens.sum()) // block_size,
        kv_bytes=model.kv_bytes,
        max_model_len=trace.longest + 1,
        host_bytes_per_s=card.host,
        router=router,
    )
    small = replace(endless, replicas=replicas, num_blocks=cache // block_size)
    tier = TierSpec("host", load // replicas // block_size, card.host)
    clusters = {
        "one replica, endless cache": endless,
        f"{replicas} replicas": small,
        f"{replicas} replicas, and a tier": replace(small, tiers=(tier,)),
    }
    shares = [CachedShare.of(name, simulate(spec, trace), trace) for name, spec in clusters.items()]
    return CachedReport(len(trace), float(trace.prompt_tokens.mean()), load, replicas, cache, shares)


def show_report(report: CachedReport) -> None:
    table = make_table("cluster", "prompt tokens cached, %", "of these from the tier, %", "first token P90, ms")
    for share in report.shares:
        from_tier = 100 * share.from_tiers / share.cached if share.cached else 0.0
        table.add_row(share.name, figure(100 * share.cached, 2), figure(from_tier), figure(share.first_token_p90_ms, 0))
    show(
        f"{report.requests} requests of {report.prompt_tokens:,.0f} tokens; sessions of {report.load:,} tokens at a "
        f"time, {report.cache:,} of which fit the cache of a replica",
        table,
        f"of what the endless cache has: {report.of_endless:.1%} (goal: at least 95 %)",
    )


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests of all sessions.")] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 60,
    replicas: Annotated[int, typer.Option(min=1)] = 4,
    overcommit: Annotated[
        float, typer.Option(min=0.1, help="Tokens of the load per token that fits the caches.")
    ] = 5.0,
    scale: Annotated[float, typer.Option(help="Factor of all tokens.")] = 0.05,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    router: Annotated[str, typer.Option(help="As for `manta simulate`.")] = "prefix_aware",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal sessions.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate agents on replicas with small caches and tiers, and with an endless cache."""
    trace = make_trace("agents", requests, 10.0, seed=seed).scaled(scale).with_active(sessions)
    report = measure(trace, sessions, replicas, overcommit, block_size, router)  # type: ignore[arg-type]
    print_report(report, as_json, show_report)


if __name__ == "__main__":
    run(main)
