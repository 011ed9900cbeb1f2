"""The options of `manta simulate`, each of them a flag (cluster/flags.py). Light: `manta --help` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

TRAFFIC, CLUSTER, ENGINE, GOAL = "Traffic", "Cluster", "Engine", "What is good enough"

T = TypeVar("T")


def option(panel: str, default: T, help: str, **settings: Any) -> T:
    """Make a field with its flag. settings: arguments of `typer.Option`."""
    return field(default=default, metadata={"rich_help_panel": panel, "help": help, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The source of the requests."""

    trace: str = option(
        TRAFFIC,
        "azure-conversation",
        "azure-conversation, azure-code, mooncake, shared-prefix, fixed (512 in, 64 out), or a file of JSON lines in "
        "Mooncake's format: timestamp (ms), input_length, output_length and maybe hash_ids (one per 512 tokens).",
    )
    requests: int = option(TRAFFIC, 2000, "Number of requests; of a file, the first so many.", min=1)
    rate: float | None = option(TRAFFIC, None, "Requests per second; default: 10, and of a file its own times.")
    burstiness: float = option(TRAFFIC, 1.0, "1 is a Poisson process, below 1 requests come in bursts.")
    seed: int = option(TRAFFIC, 0, "Equal seeds give equal traces and results.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions(TraceOptions):
    """The traffic, the cluster, its engines, and what is good enough."""

    replicas: int = option(CLUSTER, 4, "Replicas that answer requests; with --plan it is searched.", min=1)
    prefill_replicas: int = option(
        CLUSTER,
        0,
        "Replicas that compute prompts for them. With --plan: 0 tries one pool only, more tries two pools as well.",
        min=0,
    )
    router: str = option(CLUSTER, "prefix_aware", "prefix_aware, power_of_two, round_robin or random.")
    handoff: str = option(CLUSTER, "always", "always, or auto: as the engines' own weighing decides. For two pools.")
    network_gbit: float | None = option(CLUSTER, None, "Per replica, for KV; default: that of its cards.")
    autoscale: int | None = option(
        CLUSTER,
        None,
        "Begin with --replicas, and let the autoscaler use up to so many in each pool; not with --plan.",
        min=1,
    )
    startup_s: float = option(CLUSTER, 60.0, "Seconds until a new replica takes requests.", min=0)
    model: str = option(
        ENGINE,
        "llama-3.1-8b",
        "llama-3.1-8b, llama-3.1-70b, qwen3-0.6b, qwen3-32b, opt-13b, or a folder with a config.json.",
    )
    card: str = option(ENGINE, "h100", "a100, h100, h200 or l4.")
    tensor_parallel: int = option(ENGINE, 1, "Cards per replica.", min=1)
    cost: Path | None = option(  # noqa: RUF009  its metadata is no default
        ENGINE,
        None,
        "What steps cost, as measured by `manta simulate fit`; in place of what the data sheets say.",
        exists=True,
        dir_okay=False,
    )
    num_blocks: int | None = option(ENGINE, None, "KV blocks of a replica; default: what fits.", min=1)
    block_size: int = option(ENGINE, 64, "Tokens per KV block.", min=1)
    max_num_batched_tokens: int = option(ENGINE, 2048, "Tokens that one step may compute: the prompt chunk.", min=1)
    max_num_seqs: int = option(ENGINE, 256, "Sequences that run at a time.", min=1)
    prefix_caching: bool = option(ENGINE, True, "Reuse the KV of equal prefixes.")
    ttft_ms: float = option(GOAL, 2000.0, "Limit of the time to the first token.")
    tpot_ms: float = option(GOAL, 50.0, "Limit of the mean time per token after it.")
    good: float = option(GOAL, 0.9, "Fraction of requests that must keep both.", min=0, max=1)
