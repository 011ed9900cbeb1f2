"""The cluster that is simulated: a frozen specification, made from the options of `manta simulate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.autoscaling.slo import Limits, Slo
from cluster.simulator.cost_model import CostModel, read_cost
from cluster.simulator.hardware import ModelShape, find_card, find_model, kv_tokens, roofline
from cluster.simulator.options import HandoffPolicy, RouterName, SimulationOptions
from cluster.simulator.trace import KINDS, Trace, make_trace
from deployments.routing.config import Role
from engine.config import EngineConfig
from engine.errors import InvalidParameter

NO_LIMIT = 10**9
DEFAULT_RATE = 10.0
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 3.0, 300.0  # the defaults of serve_config.yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Equal replicas behind one router."""

    replicas: int
    config: EngineConfig
    cost: CostModel
    num_blocks: int  #: KV blocks of one replica
    gpus: int = 1  #: of one replica
    router: RouterName = "prefix_aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Delays of calls and messages, and the rate of the links that carry KV."""

    call_s: float = 0.002  #: a call to a replica, one way
    busy_s: float = 0.0  #: more of that for each replica that computes as the call sets out, where they share cores
    token_s: float = 0.001  #: a token's way to the client
    handoff_s: float = 0.004  #: the messages of a handoff when all is computed: Progress, Release, Released
    bytes_per_s: float = 25e9  #: at which one prefill replica sends KV, to all decode replicas together

    def with_request(self, request_s: float) -> Network:
        """Spread over both ways what a client was seen to wait for its first token beside the steps of an engine."""
        return replace(self, call_s=request_s / 2, token_s=request_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """The autoscaler's own settings, and how long a replica takes to start."""

    targets: Slo
    limits: dict[Role, Limits]
    startup_s: float = 60.0  #: from when a replica is wanted until it takes requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """One or two pools, and everything between them."""

    decode: PoolSpec  #: answers requests
    prefill: PoolSpec | None = None  #: computes prompts for it, if there is one
    network: Network = Network()
    handoff: HandoffPolicy = "always"  #: where prompts are computed if there are two pools, as HandoffConfig.policy
    kv_bytes: float = 0.0  #: of one token
    max_model_len: int = 131_072
    max_waiting: int | None = None  #: sequences that the ingress queues before it refuses more; None: all
    scaling: ScalingSpec | None = None  #: None: the numbers of replicas stay
    #: By what fraction a step takes longer for each other replica that computes as it begins, and for each request or
    #: handoff on its way. 0 where each replica has cores and memory bandwidth enough; above, nothing is fast-forwarded.
    contention: float = 0.0
    seed: int = 0

    @property
    def gpus(self) -> int:
        return sum(pool.replicas * pool.gpus for pool in (self.decode, self.prefill) if pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSlo:
    """The two times that a request has to keep to count as good, as in DistServe (arXiv:2401.09670)."""

    ttft_s: float = 2.0  #: from its arrival to its first token
    tpot_s: float = 0.05  #: mean time between its tokens
    fraction: float = 0.9  #: of all requests has to be good for the cluster to be good enough


# -- from options ------------------------------------------------------------------------------------------


def find_trace(options: SimulationOptions) -> Trace:
    """Raises InvalidParameter."""
    if options.trace in KINDS:
        rate = DEFAULT_RATE if options.rate is None else options.rate
        return make_trace(options.trace, options.requests, rate, burstiness=options.burstiness, seed=options.seed)
    if not Path(options.trace).is_file():
        raise InvalidParameter("trace", options.trace, f"a file, or one of {', '.join(KINDS)}")
    found = Trace.read(Path(options.trace)).first(options.requests)
    return found if options.rate is None else found.at_rate(options.rate)


def make_slo(options: SimulationOptions) -> GoodputSlo:
    """Raises InvalidParameter."""
    for flag, value in (("--ttft-ms", options.ttft_ms), ("--tpot-ms", options.tpot_ms)):
        _check_positive(flag, value, value)
    return GoodputSlo(ttft_s=options.ttft_ms / 1000, tpot_s=options.tpot_ms / 1000, fraction=options.good)


def check_plan(options: SimulationOptions, max_gpus: int) -> None:
    """Raise InvalidParameter for options that a search for the fewest GPUs cannot keep."""
    if options.autoscale is not None:
        raise InvalidParameter("--autoscale", options.autoscale, "left out with --plan, whose clusters keep their size")
    min_gpus = options.tensor_parallel * (2 if options.prefill_replicas else 1)
    if max_gpus < min_gpus:
        limit = f"at least {min_gpus}, the GPUs of the smallest cluster (--tensor-parallel {options.tensor_parallel})"
        raise InvalidParameter("--max-gpus", max_gpus, limit)


def make_cluster(options: SimulationOptions, trace: Trace) -> ClusterSpec:
    """Raises ServingError."""
    model, card = find_model(options.model), find_card(options.card)
    _check(options, model)
    blocks = options.num_blocks or kv_tokens(model, card, options.tensor_parallel) // options.block_size
    max_model_len = blocks * options.block_size
    if trace.longest >= max_model_len:
        raise _too_small(options, trace.longest, max_model_len)
    measured = read_cost(options.cost) if options.cost else None
    gbit = options.network_gbit
    bytes_per_s = card.network * options.tensor_parallel if gbit is None else gbit / 8 * 1e9
    _check_positive("--network-gbit", gbit, bytes_per_s)
    network = Network(bytes_per_s=bytes_per_s)
    if measured and measured.request_s is not None:
        network = network.with_request(measured.request_s)
    pools = {
        role: PoolSpec(
            replicas=replicas,
            config=EngineConfig(
                block_size=options.block_size,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_num_seqs=options.max_num_seqs,
                max_waiting=NO_LIMIT,
                enable_prefix_caching=options.prefix_caching,
            ),
            cost=measured.cost if measured else roofline(model, card, options.tensor_parallel),
            num_blocks=blocks,
            gpus=options.tensor_parallel,
            router=options.router,
        )
        for role, replicas in _replicas(options).items()
    }
    return ClusterSpec(
        decode=pools["decode"],
        prefill=pools.get("prefill"),
        network=network,
        handoff=options.handoff,
        kv_bytes=model.kv_bytes,
        max_model_len=max_model_len,
        scaling=_scaling(options) if options.autoscale else None,
        seed=options.seed,
    )


def _replicas(options: SimulationOptions) -> dict[Role, int]:
    if not options.prefill_replicas:
        return {"decode": options.replicas}
    return {"decode": options.replicas, "prefill": options.prefill_replicas}


def _check(options: SimulationOptions, model: ModelShape) -> None:
    """Raises InvalidParameter."""
    if options.handoff == "auto" and not options.prefill_replicas:
        raise InvalidParameter("--handoff", "auto", "always where there is no prefill pool (--prefill-replicas)")
    for flag, replicas in (("--replicas", options.replicas), ("--prefill-replicas", options.prefill_replicas)):
        if options.autoscale is not None and options.autoscale < replicas:
            limit = f"at least {flag} ({replicas}), with which the pool begins"
            raise InvalidParameter("--autoscale", options.autoscale, limit)
    if not math.isfinite(options.startup_s):
        raise InvalidParameter("--startup-s", options.startup_s, "finite")
    heads, kv_heads, ranks = model.heads, model.kv_heads, options.tensor_parallel
    if heads % ranks:
        raise InvalidParameter("--tensor-parallel", ranks, f"a divisor of the {heads} heads of {options.model}")
    if kv_heads % ranks and ranks % kv_heads:
        limit = f"a divisor or a multiple of the {kv_heads} KV heads of {options.model}"
        raise InvalidParameter("--tensor-parallel", ranks, limit)


def _too_small(options: SimulationOptions, longest: int, capacity: int) -> InvalidParameter:
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


def _scaling(options: SimulationOptions) -> ScalingSpec:
    assert options.autoscale is not None
    limits = Limits(
        min_replicas=1,
        max_replicas=options.autoscale,
        max_num_seqs=options.max_num_seqs,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
        scale_to_zero_delay_s=math.inf,
    )
    slo = make_slo(options)
    targets = Slo(ttft_ms=1000 * slo.ttft_s, itl_ms=1000 * slo.tpot_s)
    return ScalingSpec(targets=targets, limits=dict.fromkeys(_replicas(options), limits), startup_s=options.startup_s)


def _check_positive(flag: str, given: float | None, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidParameter(flag, given, "above 0 and finite")
