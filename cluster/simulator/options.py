"""Options of `manta simulate`, each of which is a flag. Imports little, because `manta --help` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config import option

TRAFFIC, CLUSTER, ENGINE, GOAL = (
    {"rich_help_panel": panel} for panel in ("Traffic", "Cluster", "Engine", "What is good enough")
)

HandoffPolicy = Literal["auto", "always"]
RouterName = Literal["prefix_aware", "power_of_two", "round_robin", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Traffic, cluster, engines, and SLO of a simulation."""

    trace: str = option(
        "azure-conversation",
        "azure-conversation, azure-code, mooncake, shared-prefix, fixed (512 in, 64 out), or a file of JSON lines in "
        "Mooncake's format: timestamp (ms), input_length, output_length and maybe hash_ids (one per 512 tokens).",
        **TRAFFIC,
    )
    requests: int = option(2000, "Number of requests; of a file, this many from its start.", **TRAFFIC, min=1)
    rate: float | None = option(None, "Requests per second; default: 10, and of a file its own times.", **TRAFFIC)
    burstiness: float = option(1.0, "1 is a Poisson process, below 1 requests come in bursts.", **TRAFFIC)
    seed: int = option(0, "Equal seeds give equal traces and results.", **TRAFFIC)
    replicas: int = option(4, "Replicas that answer requests; with --plan it is searched.", **CLUSTER, min=1)
    prefill_replicas: int = option(
        0,
        "Replicas that compute prompts for them. With --plan: 0 tries one pool only, more tries two pools as well.",
        **CLUSTER,
        min=0,
    )
    router: RouterName = option("prefix_aware", "prefix_aware, power_of_two, round_robin or random.", **CLUSTER)
    handoff: HandoffPolicy = option(
        "always", "always, or auto: as the engines' own weighing decides. For two pools.", **CLUSTER
    )
    network_gbit: float | None = option(None, "Per replica, for KV; default: that of its cards.", **CLUSTER)
    autoscale: int | None = option(
        None,
        "Begin with --replicas, and let the autoscaler use up to this many in each pool; not with --plan.",
        **CLUSTER,
        min=1,
    )
    startup_s: float = option(60.0, "Seconds until a new replica takes requests.", **CLUSTER, min=0)
    model: str = option(
        "llama-3.1-8b",
        "llama-3.1-8b, llama-3.1-70b, qwen3-0.6b, qwen3-32b, opt-13b, or a folder with a config.json.",
        **ENGINE,
    )
    card: str = option("h100", "a100, h100, h200 or l4.", **ENGINE)
    tensor_parallel: int = option(1, "Cards per replica.", **ENGINE, min=1)
    cost: Path | None = option(
        None,
        "What steps cost, as `python -m benchmarks.simulator.fit` measured it; default: what data sheets say.",
        **ENGINE,
        exists=True,
        dir_okay=False,
    )
    num_blocks: int | None = option(None, "KV blocks of a replica; default: what fits.", **ENGINE, min=1)
    block_size: int = option(64, "Tokens per KV block.", **ENGINE, min=1)
    max_num_batched_tokens: int = option(2048, "Tokens that one step may compute: the prompt chunk.", **ENGINE, min=1)
    max_num_seqs: int = option(256, "Sequences that run at a time.", **ENGINE, min=1)
    prefix_caching: bool = option(True, "Reuse the KV of equal prefixes.", **ENGINE)
    ttft_ms: float = option(2000.0, "Limit of the time to the first token.", **GOAL)
    tpot_ms: float = option(50.0, "Limit of the mean time per token after it.", **GOAL)
    good: float = option(0.9, "Fraction of requests that must keep both.", **GOAL, min=0, max=1)
