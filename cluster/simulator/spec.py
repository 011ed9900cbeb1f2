"""What is simulated. Frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cluster.autoscaling.slo import Limits, Slo
from cluster.simulator.cost_model import CostModel
from deployments.routing.config import Role
from engine.config import EngineConfig

HandoffPolicy = Literal["auto", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Equal replicas. config: of each engine. num_blocks: of KV. gpus: of one replica. router: one of ROUTERS."""

    replicas: int
    config: EngineConfig
    cost: CostModel
    num_blocks: int
    gpus: int = 1
    router: str = "prefix_aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """call_s: a call to a replica, one way. token_s: a token's way to the client.

    busy_s: what the call takes longer for each replica that computes as a request sets out, where they share cores.
    handoff_s: what the messages of a handoff take when all is computed: Progress, Release, Released.
    bytes_per_s: at which one prefill replica sends KV, to all decode replicas together.
    """

    call_s: float = 0.002
    busy_s: float = 0.0
    token_s: float = 0.001
    handoff_s: float = 0.004
    bytes_per_s: float = 25e9

    def with_request(self, request_s: float) -> Network:
        """request_s: what a client was seen to wait for its first token beside the steps of an engine: both ways."""
        return replace(self, call_s=request_s / 2, token_s=request_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """targets, limits: the autoscaler's own. startup_s: from when a replica is wanted until it takes requests."""

    targets: Slo
    limits: dict[Role, Limits]
    startup_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """decode: the pool that answers requests. prefill: the pool that computes prompts for it, if there is one.

    handoff: where prompts are computed if there is: as HandoffConfig.policy. kv_bytes: of one token.
    max_waiting: sequences that the ingress queues before it refuses more; None: all.
    scaling: lets the numbers of replicas change as the autoscaler wants; None: they stay.
    contention: by what share a step takes longer for each other replica of both pools that computes as it begins, and
        for each request or handoff on its way. 0 where each replica has cores and memory bandwidth enough to itself.
        Above 0, no steps are taken many at once.
    """

    decode: PoolSpec
    prefill: PoolSpec | None = None
    network: Network = Network()
    handoff: HandoffPolicy = "always"
    kv_bytes: float = 0.0
    max_model_len: int = 131_072
    max_waiting: int | None = None
    scaling: ScalingSpec | None = None
    contention: float = 0.0
    seed: int = 0

    @property
    def gpus(self) -> int:
        prefill = self.prefill.replicas * self.prefill.gpus if self.prefill else 0
        return self.decode.replicas * self.decode.gpus + prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputSlo:
    """What a request has to keep for it to count as good: both, as in DistServe (arXiv:2401.09670).

    ttft_s: from its arrival to its first token. tpot_s: mean time between its tokens. share: of all requests, that has
    to be good for the cluster to be good enough.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.05
    share: float = 0.9
