"""From what a user says to what is simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from cluster.autoscaling.slo import Limits, Slo
from cluster.simulator.cost_file import read_cost
from cluster.simulator.hardware import ModelShape, find_card, find_model, kv_tokens, roofline
from cluster.simulator.routing import ROUTERS
from cluster.simulator.spec import ClusterSpec, GoodputSlo, HandoffPolicy, Network, PoolSpec, ScalingSpec
from cluster.simulator.trace import Trace
from deployments.routing.config import Role
from engine.config import EngineConfig
from engine.errors import InvalidParameter

NO_LIMIT = 10**9
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 3.0, 300.0  # as in serve_config.yaml where nothing else is said


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of `manta simulate`, by their names."""

    replicas: int
    prefill_replicas: int
    router: str
    handoff: str
    network_gbit: float | None
    model: str
    card: str
    tensor_parallel: int
    cost: Path | None
    num_blocks: int | None
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    prefix_caching: bool
    autoscale: int | None
    startup_s: float
    seed: int


def make_slo(ttft_ms: float, tpot_ms: float, share: float) -> GoodputSlo:
    """Raises InvalidParameter."""
    for flag, value in (("--ttft-ms", ttft_ms), ("--tpot-ms", tpot_ms)):
        if not (value > 0 and math.isfinite(value)):
            raise InvalidParameter(flag, value, "above 0 and finite")
    return GoodputSlo(ttft_s=ttft_ms / 1000, tpot_s=tpot_ms / 1000, share=share)


def check_plan(options: ClusterOptions, max_gpus: int) -> None:
    """Raises InvalidParameter for options that a search for the fewest GPUs cannot keep."""
    if options.autoscale is not None:
        raise InvalidParameter("--autoscale", options.autoscale, "left out with --plan, whose clusters keep their size")
    min_gpus = options.tensor_parallel * (2 if options.prefill_replicas else 1)
    if max_gpus < min_gpus:
        limit = f"at least {min_gpus}, the GPUs of the smallest cluster (--tensor-parallel {options.tensor_parallel})"
        raise InvalidParameter("--max-gpus", max_gpus, limit)


def make_cluster(options: ClusterOptions, trace: Trace, slo: GoodputSlo) -> ClusterSpec:
    """Raises ServingError."""
    model, card = find_model(options.model), find_card(options.card)
    _check(options, model)
    config = EngineConfig(
        block_size=options.block_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_waiting=NO_LIMIT,
        enable_prefix_caching=options.prefix_caching,
    )
    blocks = options.num_blocks or kv_tokens(model, card, options.tensor_parallel) // options.block_size
    max_model_len = blocks * options.block_size
    if trace.longest >= max_model_len:
        raise _too_small(options, trace.longest, max_model_len)
    measured = read_cost(options.cost) if options.cost else None
    cost = measured.cost if measured else roofline(model, card, options.tensor_parallel)

    def pool(replicas: int) -> PoolSpec:
        return PoolSpec(
            replicas=replicas,
            config=config,
            cost=cost,
            num_blocks=blocks,
            gpus=options.tensor_parallel,
            router=options.router,
        )

    gbit = options.network_gbit
    bytes_per_s = card.network * options.tensor_parallel if gbit is None else gbit / 8 * 1e9
    if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
        raise InvalidParameter("--network-gbit", gbit, "above 0 and finite")
    network = Network(bytes_per_s=bytes_per_s)
    if measured and measured.request_s is not None:
        network = network.with_request(measured.request_s)
    return ClusterSpec(
        decode=pool(options.replicas),
        prefill=pool(options.prefill_replicas) if options.prefill_replicas else None,
        network=network,
        handoff=cast(HandoffPolicy, options.handoff),
        kv_bytes=model.kv_bytes,
        max_model_len=max_model_len,
        scaling=_scaling(options, slo) if options.autoscale else None,
        seed=options.seed,
    )


def _check(options: ClusterOptions, model: ModelShape) -> None:
    """Raises ServingError."""
    if options.router not in ROUTERS:
        raise InvalidParameter("--router", options.router, f"one of {', '.join(ROUTERS)}")
    if options.handoff not in get_args(HandoffPolicy):
        raise InvalidParameter("--handoff", options.handoff, f"one of {', '.join(get_args(HandoffPolicy))}")
    if options.handoff == "auto" and not options.prefill_replicas:
        raise InvalidParameter("--handoff", "auto", "always where there is no prefill pool (--prefill-replicas)")
    for flag, replicas in (("--replicas", options.replicas), ("--prefill-replicas", options.prefill_replicas)):
        if options.autoscale is not None and options.autoscale < replicas:
            raise InvalidParameter(
                "--autoscale", options.autoscale, f"at least {flag} ({replicas}), with which the pool begins"
            )
    if not math.isfinite(options.startup_s):
        raise InvalidParameter("--startup-s", options.startup_s, "finite")
    heads, kv_heads, ranks = model.heads, model.kv_heads, options.tensor_parallel
    if heads % ranks:
        raise InvalidParameter("--tensor-parallel", ranks, f"a divisor of the {heads} heads of {options.model}")
    if kv_heads % ranks and ranks % kv_heads:
        limit = f"a divisor or a multiple of the {kv_heads} KV heads of {options.model}"
        raise InvalidParameter("--tensor-parallel", ranks, limit)


def _too_small(options: ClusterOptions, longest: int, capacity: int) -> InvalidParameter:
    """longest: tokens of a request. capacity: tokens whose KV a replica holds."""
    if options.num_blocks is not None:
        blocks, size = longest // options.block_size + 1, options.block_size
        limit = f"at least {blocks}, so that blocks of {size} tokens hold the longest request of --trace ({longest})"
        return InvalidParameter("--num-blocks", options.num_blocks, limit)
    limit = (
        f"so many cards that the KV of the longest request of --trace fits beside the weights ({longest} tokens; "
        f"{capacity} fit on {options.tensor_parallel} {options.card})"
    )
    return InvalidParameter("--tensor-parallel", options.tensor_parallel, limit)


def _scaling(options: ClusterOptions, slo: GoodputSlo) -> ScalingSpec:
    assert options.autoscale is not None
    limits = Limits(
        min_replicas=1,
        max_replicas=options.autoscale,
        max_num_seqs=options.max_num_seqs,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
        scale_to_zero_delay_s=math.inf,
    )
    roles: tuple[Role, ...] = ("decode", "prefill") if options.prefill_replicas else ("decode",)
    targets = Slo(ttft_ms=1000 * slo.ttft_s, itl_ms=1000 * slo.tpot_s)
    return ScalingSpec(targets=targets, limits=dict.fromkeys(roles, limits), startup_s=options.startup_s)
