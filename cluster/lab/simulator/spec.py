"""Frozen specification of the simulated cluster, made from the options of `manta simulate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster.autoscaling.slo import Limits
from cluster.config.simulation_options import HandoffPolicy, RouterName, SimulationOptions
from cluster.lab.simulator.cost_model import (
    ALIKE,
    CostModel,
    Layers,
    differs,
    find_card,
    find_model,
    kv_tokens,
    read_cost,
    roofline,
)
from cluster.lab.simulator.kv_layers import KVLayers, divide
from cluster.lab.simulator.trace import Trace, is_file, make_trace
from deployments.billing.prices import FREE, Prices
from deployments.routing.config import Role
from engine.config import EngineConfig
from engine.errors import InvalidParameter, ServingError
from engine.options.handoff import HandoffConfig

NO_LIMIT = 10**9
GIB = 2**30
DEFAULT_RATE, DEFAULT_REQUESTS = 10.0, 2000
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 3.0, 300.0  # defaults of serve_config.yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSlo:
    """The two times that a good request must meet, as in DistServe (arXiv:2401.09670)."""

    ttft_s: float = 2.0  #: time from its arrival to its first token
    tpot_s: float = 0.05  #: mean time between its tokens
    fraction: float = 0.9  #: fraction of all requests that must be good

    @classmethod
    def of(cls, options: SimulationOptions) -> GoodputSlo:
        return cls(ttft_s=options.ttft_ms / 1000, tpot_s=options.tpot_ms / 1000, fraction=options.good)

    def __str__(self) -> str:
        return f"good: first token within {1000 * self.ttft_s:g} ms, and {1000 * self.tpot_s:g} ms per token after it"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier below the KV cache of a replica. All replicas share one store."""

    name: Literal["host", "disk", "store"]
    blocks: int  #: KV blocks that it keeps
    bytes_per_s: float  #: rate of one replica's copies in each direction


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """One or two pools of identical replicas, and the connections between them."""

    replicas: int  #: replicas that answer requests
    prefill_replicas: int = 0  #: replicas that compute prompts for them; 0 for a single pool
    engine: EngineConfig
    prefill_engine: EngineConfig | None = None  #: None for the same as `engine`
    cost: CostModel
    contention: float = 0.0  #: by what fraction a step takes longer for each other replica that computes as it begins
    num_blocks: int  #: KV blocks of one replica
    kv_layers: KVLayers | None = None  #: None if all layers keep all tokens
    tiers: tuple[TierSpec, ...] = ()  #: tiers below the KV cache of each replica, the fastest first
    host_bytes_per_s: float = 25e9  #: rate of one replica's copies to host memory, from where disk and store take them
    replica_gpus: int = 1
    router: RouterName = "prefix_aware"  #: policy of the router before each pool
    handoff: HandoffPolicy = "always"  #: where prompts are computed if there are two pools (HandoffConfig.policy)
    layers: Layers = ALIKE  #: parts of a sequence that a step reads
    kv_bytes: float = 0.0  #: bytes of one token's KV in all layers
    max_model_len: int = 131_072
    max_waiting: int = NO_LIMIT  #: sequences that the ingress queues before it refuses more
    call_s: float = 0.002  #: seconds of a call to a replica, one way
    token_s: float = 0.001  #: seconds for a token to reach the client
    handoff_s: float = 0.004  #: seconds of a handoff's last messages: Progress, Release, Released
    bytes_per_s: float = 25e9  #: rate at which one prefill replica sends KV, to all decode replicas together
    slo: GoodputSlo = GoodputSlo()
    limits: Limits | None = None  #: limits of an autoscaled pool, which aims at the SLO; None for fixed pools
    move_requests: bool = True  #: whether the requests of a replica that the autoscaler ends move to others
    switch_roles: bool = False  #: whether replicas change between the two pools; `limits` are then those of both
    startup_s: float = 60.0  #: seconds from when a replica is desired until it takes requests
    prices: Prices = FREE  #: what an engine and its KV cache cost; FREE if nobody asks for costs
    seed: int = 0

    @property
    def sizes(self) -> dict[Role, int]:
        """Number of replicas of each pool."""
        sizes: dict[Role, int] = {"decode": self.replicas, "prefill": self.prefill_replicas}
        return {role: size for role, size in sizes.items() if size}

    @property
    def gpus(self) -> int:
        return self.replica_gpus * sum(self.sizes.values())

    @property
    def moves_requests(self) -> bool:
        """Whether requests move: with one pool that the autoscaler can shrink."""
        return self.move_requests and self.limits is not None and not self.prefill_replicas

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, if all layers keep all tokens."""
        return int(self.kv_bytes * self.engine.known_block_size)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each KV cache group."""
        return (self.block_bytes,) if self.kv_layers is None else self.kv_layers.block_bytes

    def engine_of(self, role: Role) -> EngineConfig:
        return self.prefill_engine or self.engine if role == "prefill" else self.engine

    def with_request(self, request_s: float) -> ClusterSpec:
        """Return the spec with measured latencies. request_s: time to the first token, less the time of steps; half of
        it is for the call to a replica, half for sending the token to the client."""
        return replace(self, call_s=request_s / 2, token_s=request_s / 2)


# -- from options ------------------------------------------------------------------------------------------


def find_trace(options: SimulationOptions, *, whole_file: bool = False) -> Trace:
    """Return the trace. whole_file: all requests of a file, however many are asked for. Raises InvalidParameter."""
    found = _unscaled_trace(options, whole_file).scaled(options.scale)
    active = options.max_active_conversations
    return found if active is None else found.with_active(active)


def requests_of(options: SimulationOptions, trace: Trace) -> int:
    """Return how many requests of a recorded trace are simulated, at most. Raises InvalidParameter if it has fewer
    than are asked for."""
    if options.requests is not None and options.requests > len(trace):
        raise InvalidParameter("--requests", options.requests, f"at most {len(trace)}, the requests of {trace.name}")
    return options.requests or DEFAULT_REQUESTS


def _unscaled_trace(options: SimulationOptions, whole_file: bool) -> Trace:
    if is_file(options.trace):
        found = Trace.read(Path(options.trace))
        found = found if whole_file else found.first(requests_of(options, found))
        found = found if options.rate is None else found.at_rate(options.rate)
        return found if options.burstiness is None else found.drawn(options.burstiness, options.seed)
    rate = DEFAULT_RATE if options.rate is None else options.rate
    burstiness = 1.0 if options.burstiness is None else options.burstiness
    requests = options.requests or DEFAULT_REQUESTS
    return make_trace(options.trace, requests, rate, burstiness=burstiness, seed=options.seed)


def check_plan(options: SimulationOptions, max_gpus: int) -> None:
    """Raise InvalidParameter for options that contradict a search for the fewest GPUs."""
    if options.engine_hour is not None and options.tensor_parallel_size is None and options.cost is None:
        limit = "left out for --gpu-hour, or given with --tensor-parallel-size: --plan chooses the cards of an engine"
        raise InvalidParameter("--engine-hour", options.engine_hour, limit)
    min_gpus = (options.tensor_parallel_size or 1) * (2 if options.prefill_replicas else 1)
    if max_gpus < min_gpus:
        cards = options.tensor_parallel_size or 1
        limit = f"at least {min_gpus}, the GPUs of the smallest cluster (--tensor-parallel-size {cards})"
        raise InvalidParameter("--max-gpus", max_gpus, limit)


def make_cluster(options: SimulationOptions, trace: Trace) -> ClusterSpec:
    """Return the cluster described by the options. Raises ServingError."""
    _check(options)
    model, card, ranks = find_model(options.model), find_card(options.card), options.tensor_parallel_size or 1
    _check_ranks(ranks, model.heads, model.kv_heads, options.model)
    engine = EngineConfig(
        block_size=options.block_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_waiting=NO_LIMIT,
        enable_prefix_caching=options.prefix_caching,
    )
    kv_layers = None
    if model.config is not None and differs(model.config):
        handoff = HandoffConfig(role="decode") if options.prefill_replicas else None
        kv_layers, longest = divide(
            model,
            card,
            ranks,
            replace(engine, num_gpu_blocks_override=options.num_gpu_blocks_override, handoff=handoff),
        )
        num_blocks = kv_layers.blocks[0]
    else:
        num_blocks = options.num_gpu_blocks_override or kv_tokens(model, card, ranks) // options.block_size
        longest = num_blocks * options.block_size
    if trace.longest >= longest:
        raise _too_small(options, trace.longest, longest)
    measured = read_cost(options.cost) if options.cost else None
    spec = ClusterSpec(
        replicas=options.replicas,
        prefill_replicas=options.prefill_replicas,
        engine=engine,
        cost=measured.cost if measured else roofline(model, card, ranks),
        num_blocks=num_blocks,
        kv_layers=kv_layers,
        tiers=_tiers(options, model.kv_bytes, card.host * ranks, alike=kv_layers is None),
        host_bytes_per_s=card.host * ranks,
        replica_gpus=ranks,
        router=options.router,
        handoff=options.handoff,
        layers=ALIKE if model.config is None else Layers.of(model.config),
        kv_bytes=model.kv_bytes,
        max_model_len=longest,
        bytes_per_s=card.network * ranks if options.network_gbit is None else options.network_gbit / 8 * 1e9,
        slo=GoodputSlo.of(options),
        limits=_limits(options),
        move_requests=options.move_requests,
        switch_roles=options.switch_roles,
        startup_s=options.startup_s,
        prices=_prices(options, ranks),
        seed=options.seed,
    )
    return spec if measured is None or measured.request_s is None else spec.with_request(measured.request_s)


def make_clusters(options: SimulationOptions, trace: Trace, sizes: Sequence[int]) -> list[ClusterSpec]:
    """Return a cluster for each of the numbers of cards that are enough for a replica, in their order. Raises
    ServingError if none is."""
    found, refusals = [], []
    for size in sizes:
        try:
            found.append(make_cluster(replace(options, tensor_parallel_size=size), trace))
        except ServingError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


def _tiers(options: SimulationOptions, kv_bytes: float, host: float, alike: bool) -> tuple[TierSpec, ...]:
    """Return the tiers of a replica. host: bytes per second between cards and host memory. alike: whether all layers
    keep all tokens. Raises InvalidParameter."""
    found = []
    for name, flag, size, rate in (
        ("host", "--kv-offloading-size", options.kv_offloading_size, host),
        ("disk", "--kv-offloading-disk-size", options.kv_offloading_disk_size, options.disk_gbit / 8 * 1e9),
        ("store", "--kv-offloading-store-size", options.kv_offloading_store_size, options.store_gbit / 8 * 1e9),
    ):
        if size is None:
            continue
        if not alike:
            limit = "left out for a model whose layers keep different tokens, which the simulator cannot offload"
            raise InvalidParameter(flag, size, limit)
        blocks = int(size * GIB / kv_bytes) // options.block_size if math.isfinite(size) else 0
        if blocks < 1:
            raise InvalidParameter(flag, size, "finite, and enough for one block")
        found.append(TierSpec(name, blocks, rate))  # type: ignore[arg-type]
    return tuple(found)


def _prices(options: SimulationOptions, cards: int) -> Prices:
    """Return the price list. cards: of an engine. Raises InvalidParameter."""
    engine_hour = options.engine_hour
    if options.gpu_hour is not None:
        if engine_hour is not None:
            limit = f"left out with --gpu-hour: an engine has {cards} cards"
            raise InvalidParameter("--engine-hour", engine_hour, limit)
        engine_hour = options.gpu_hour * cards
    return Prices(engine_hour=engine_hour or 0.0, kv_gib_hour=options.kv_gib_hour or 0.0)


def _limits(options: SimulationOptions) -> Limits | None:
    """Return the limits of each pool, or of both together if roles change; None if pools have fixed sizes."""
    max_replicas, max_num_seqs = options.autoscale, options.max_num_seqs
    if options.switch_roles:
        max_replicas = 2 * max_replicas if max_replicas else options.replicas + options.prefill_replicas
    if max_replicas is None:
        return None
    return Limits(
        min_replicas=1,
        max_replicas=max_replicas,
        max_num_seqs=max_num_seqs,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
        scale_to_zero_delay_s=math.inf,
    )


def _check(options: SimulationOptions) -> None:
    """Check the options. Raises InvalidParameter."""
    for name in ("ttft_ms", "tpot_ms", "network_gbit", "disk_gbit", "store_gbit"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InvalidParameter(f"--{name.replace('_', '-')}", value, "above 0 and finite")
    if options.handoff == "auto" and not options.prefill_replicas:
        raise InvalidParameter("--handoff", "auto", "always, because there is no prefill pool (--prefill-replicas)")
    if options.switch_roles and not options.prefill_replicas:
        raise InvalidParameter(
            "--switch-roles", True, "left out, because there is no prefill pool (--prefill-replicas)"
        )
    for flag, replicas in (("--replicas", options.replicas), ("--prefill-replicas", options.prefill_replicas)):
        if options.autoscale is not None and options.autoscale < replicas:
            limit = f"at least {flag} ({replicas}), the initial size of the pool"
            raise InvalidParameter("--autoscale", options.autoscale, limit)
    if not math.isfinite(options.startup_s):
        raise InvalidParameter("--startup-s", options.startup_s, "finite")


def _check_ranks(ranks: int, heads: int, kv_heads: int, model: str) -> None:
    """Check that heads divide among the ranks. Raises InvalidParameter."""
    if heads % ranks:
        raise InvalidParameter("--tensor-parallel-size", ranks, f"a divisor of the {heads} heads of {model}")
    if kv_heads % ranks and ranks % kv_heads:
        limit = f"a divisor or a multiple of the {kv_heads} KV heads of {model}"
        raise InvalidParameter("--tensor-parallel-size", ranks, limit)


def _too_small(options: SimulationOptions, longest: int, capacity: int) -> InvalidParameter:
    """Return the error for a KV cache that is too small. longest: tokens of the longest request. capacity: tokens whose
    KV a replica can hold."""
    if options.num_gpu_blocks_override is not None:
        blocks, size = longest // options.block_size + 1, options.block_size
        limit = f"at least {blocks}, so that blocks of {size} tokens hold the longest request of --trace ({longest})"
        return InvalidParameter("--num-gpu-blocks-override", options.num_gpu_blocks_override, limit)
    limit = (
        f"enough cards for the weights and the KV of the longest request of --trace ({longest} tokens; "
        f"{capacity} fit on {options.tensor_parallel_size or 1} {options.card})"
    )
    return InvalidParameter("--tensor-parallel-size", options.tensor_parallel_size or 1, limit)
