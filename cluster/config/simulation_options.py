"""Options of `manta simulate`, each a flag. Imports little, so that `manta --help`, which reads them, is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config_options import option

TRAFFIC, CLUSTER, ENGINE, GOAL, PRICES = (
    {"rich_help_panel": panel} for panel in ("Traffic", "Cluster", "Engine", "Latency targets", "Prices")
)

HandoffPolicy = Literal["auto", "always"]
RouterName = Literal["prefix_aware", "power_of_two", "round_robin", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Traffic, cluster, engines, and SLO of a simulation."""

    trace: str = option(
        "azure-conversation",
        "agents, azure-conversation, azure-code, mooncake, shared-prefix, fixed (512 in, 64 out), or a file: JSON "
        "lines in Mooncake's format, which are timestamp (ms), input_length, output_length and, optionally, "
        "hash_ids (one per 512 tokens); AIPerf's multi-turn files; Weka's traces of agents, also as a folder; or a CSV "
        "file of Azure's traces or of BurstGPT.",
        **TRAFFIC,
    )
    scale: float = option(
        1.0, "Factor of all tokens of the trace, at most 1: prompts, what they share, and answers.", **TRAFFIC
    )
    max_active_conversations: int | None = option(
        None,
        "Conversations at a time; each of the others begins as another ends. Default: each begins at its time.",
        **TRAFFIC,
        min=1,
    )
    requests: int | None = option(
        None,
        "Number of requests; of a file its first ones, which has to have so many. Default: 2000, or all of a file that "
        "has fewer.",
        **TRAFFIC,
        min=1,
    )
    rate: float | None = option(None, "Requests per second. Default: 10, or the times in the file.", **TRAFFIC)
    burstiness: float | None = option(
        None,
        "Shape of the arrivals: 1 is a Poisson process; below 1, requests arrive in bursts; above 1, more evenly. "
        "Default: 1, or the times in the file.",
        **TRAFFIC,
    )
    seed: int = option(0, "Equal seeds give equal traces and results.", **TRAFFIC)
    replicas: int = option(4, "Replicas that answer requests; --plan searches this number.", **CLUSTER, min=1)
    prefill_replicas: int = option(
        0,
        "Replicas that only compute prompts. With --plan, 0 tries one pool only, and any other "
        "number tries two pools as well.",
        **CLUSTER,
        min=0,
    )
    router: RouterName = option("prefix_aware", "prefix_aware, power_of_two, round_robin or random.", **CLUSTER)
    handoff: HandoffPolicy = option(
        "always",
        "Where prompts are computed with two pools: `always` by the prefill pool, or `auto` if "
        "the engines compare the costs.",
        **CLUSTER,
    )
    network_gbit: float | None = option(
        None, "Network bandwidth of a replica for KV, in Gbit/s. Default: that of its cards.", **CLUSTER
    )
    autoscale: int | None = option(
        None,
        "Begin with --replicas, and let the autoscaler use up to this number of replicas in "
        "each pool; not with --plan.",
        **CLUSTER,
        min=1,
    )
    move_requests: bool = option(
        True, "With one pool, move the requests of a replica that the autoscaler ends to other replicas.", **CLUSTER
    )
    switch_roles: bool = option(
        False,
        "Let replicas change between answering and computing prompts, as `handoff.switch_roles` does; needs "
        "--prefill-replicas; not with --plan.",
        **CLUSTER,
    )
    startup_s: float = option(60.0, "Seconds until a new replica takes requests.", **CLUSTER, min=0)
    model: str = option(
        "llama-3.1-8b",
        "llama-3.1-8b, llama-3.1-70b, qwen3-0.6b, qwen3-32b, opt-13b, or a folder with a config.json.",
        **ENGINE,
    )
    card: str = option("h100", "a100, h100, h200 or l4.", **ENGINE)
    tensor_parallel_size: int | None = option(
        None,
        "Cards per replica. Default: 1; --plan tries 1, 2, 4 and so on, up to --cards-per-node.",
        **ENGINE,
        min=1,
    )
    cards_per_node: int = option(8, "Cards of a machine, for --plan.", **ENGINE, min=1)
    cost: Path | None = option(
        None,
        "File with the measured cost of steps, written by `python -m benchmarks.simulator.fit`. "
        "Default: computed from data sheets.",
        **ENGINE,
        exists=True,
        dir_okay=False,
    )
    num_gpu_blocks_override: int | None = option(
        None, "KV blocks of a replica. Default: the number that fits.", **ENGINE, min=1
    )
    kv_offloading_size: float | None = option(
        None, "GiB of host memory of a replica for KV blocks that its cards may evict. Default: none.", **ENGINE
    )
    kv_offloading_disk_size: float | None = option(
        None, "GiB of the same on a disk of its own, at --disk-gbit. Default: none.", **ENGINE
    )
    kv_offloading_store_size: float | None = option(
        None, "GiB of the same in a store that all replicas share, each at --store-gbit. Default: none.", **ENGINE
    )
    disk_gbit: float = option(16.0, "Bandwidth of a replica's disk in each direction, in Gbit/s.", **ENGINE)
    store_gbit: float = option(10.0, "Bandwidth of a replica to the store in each direction, in Gbit/s.", **ENGINE)
    block_size: int = option(64, "Tokens per KV block.", **ENGINE, min=1)
    max_num_batched_tokens: int = option(
        2048, "Maximum number of tokens of a step, and so of a prompt chunk.", **ENGINE, min=1
    )
    max_num_seqs: int = option(256, "Maximum number of sequences that run at a time.", **ENGINE, min=1)
    prefix_caching: bool = option(True, "Reuse the KV of shared prefixes.", **ENGINE)
    ttft_ms: float = option(2000.0, "Limit of the time to the first token.", **GOAL)
    tpot_ms: float = option(50.0, "Limit of the mean time per token after the first.", **GOAL)
    good: float = option(0.9, "Fraction of requests that must keep both limits.", **GOAL, min=0, max=1)
    engine_hour: float | None = option(
        None, "Money for an hour of an engine, as `prices.engine_hour`; shows what the cluster costs.", **PRICES, min=0
    )
    gpu_hour: float | None = option(
        None, "Money for an hour of a card, in place of --engine-hour, for engines of several cards.", **PRICES, min=0
    )
    kv_gib_hour: float | None = option(
        None, "Money for an hour of a GiB of KV cache, as `prices.kv_gib_hour`.", **PRICES, min=0
    )
