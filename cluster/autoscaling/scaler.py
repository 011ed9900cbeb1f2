"""Scales the pools of a model. Pure Python: the caller passes the time, in seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from cluster.autoscaling.sizing import Demand, Size, Sizing
from cluster.autoscaling.slo import Limits, Slo
from deployments.routing.config import Role

MEMORY_S = 10.0  # time over which rates are averaged, because prompts come in bursts
MAX_GROWTH = 2  # largest growth at a time, times running replicas; once they are up, it shows whether more are needed
MIN_MISS_FRACTION = 0.1  # at least this fraction of queued prompt tokens is assumed to be uncached
WAKE_FRACTION = 0.05  # of an engine's time: prompts that take less in other engines do not justify a new one


# -- load ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Costs of an engine's steps, as fitted by the engine itself (engine/costs/step_cost.py); 0 while unknown."""

    decode_step_s: float = 0.0  #: fixed seconds of a decode step
    decode_sequence_s: float = 0.0  #: further seconds of a decode step per sequence
    token_s: float = 0.0  #: engine-seconds per prompt token, in total


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """Current load of one replica. Rates are over the last few seconds."""

    running: int = 0  #: sequences that hold KV
    receiving: int = 0  #: those of them whose prompts are computed by other engines
    waiting: int = 0  #: sequences in the engine's queue, or with their prompt in another engine
    queued_tokens: int = 0  #: prompt tokens still to be computed here
    prefill_tokens_per_s: float = 0.0  #: prompt tokens computed here
    cached_tokens_per_s: float = 0.0  #: prompt tokens that the prefix cache spared
    prefills_per_s: float = 0.0  #: prompts computed to their end here
    spilled_fraction: float = 0.0  #: fraction of these that the prefill pool would have computed if it had capacity
    output_tokens_per_s: float = 0.0
    itl_s: float = 0.0  #: mean time between two tokens of a sequence; 0 without any
    blocks_used: int = 0
    blocks_total: int = 1
    costs: EngineCosts = EngineCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Load of a pool's replicas, and the queue before them in ingresses."""

    target_replicas: int  #: number of replicas currently desired
    running_replicas: int  #: replicas that are up, including those that have not reported yet
    replicas: Sequence[ReplicaLoad]  #: replicas that have reported
    waiting: int = 0  #: sequences in ingresses
    waiting_tokens: int = 0  #: tokens of their prompts

    @property
    def sequences(self) -> int:
        """Sequences that run, and those that wait only for capacity."""
        return self.waiting + sum(r.running + r.waiting for r in self.replicas)

    @property
    def queued_tokens(self) -> int:
        return self.waiting_tokens + sum(r.queued_tokens for r in self.replicas)

    @property
    def busy(self) -> bool:
        return self.sequences > 0 or self.queued_tokens > 0 or any(r.prefills_per_s for r in self.replicas)


# -- decisions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Number of replicas that a pool should have from now on, and why."""

    replicas: int
    desired: int  #: replicas that the load requires now, before delays and bounds
    reason: str  #: the limit that fewer replicas would break (ttft, queue, itl, slots, kv), or idle, wake, min, roles
    inputs: dict[str, float] = field(default_factory=dict)  #: figures on which the decision rests


class ModelScaler:
    """Scales the pool that answers requests and, if there is one, the pool that computes prompts for it.

    Without a prefill pool, the first pool is also responsible for the time to the first token.
    """

    def __init__(self, slo: Slo, limits: dict[Role, Limits], memory_s: float = MEMORY_S):
        """limits: the limits of all pools of the model. A pool of fixed size has min_replicas equal to max_replicas.
        memory_s: time over which rates are averaged."""
        alone = "prefill" not in limits
        self._scalers = {
            role: PoolScaler(slo, limit, memory_s, prompts=role != "decode" or alone, decodes=role == "decode")
            for role, limit in limits.items()
        }

    def decide(self, pools: dict[Role, PoolLoad], now: float) -> dict[Role, ScalingDecision]:
        decisions: dict[Role, ScalingDecision] = {}
        for role, load in pools.items():
            spilled = self._spilled_prefill_share(pools) if role == "prefill" else 0.0
            decisions[role] = self._scalers[role].decide(load, now, spilled)
        return decisions

    def pressure(self, role: Role, replicas: int) -> float:
        """Return the highest ratio of load to limit, over all limits, for a pool's last load on this many replicas."""
        return self._scalers[role].pressure(replicas)

    def _spilled_prefill_share(self, pools: dict[Role, PoolLoad]) -> float:
        """Return the engine-seconds per second that decode replicas spend on prompts for which the prefill pool lacked
        capacity."""
        if "decode" not in pools:
            return 0.0
        token_s = self._scalers["prefill"].costs.token_s or self._scalers["decode"].costs.token_s
        return token_s * sum(r.prefill_tokens_per_s * r.spilled_fraction for r in pools["decode"].replicas)


class PoolScaler:
    """Scales one pool. prompts: whether it is responsible for the time to the first token. decodes: whether it
    generates."""

    def __init__(self, slo: Slo, limits: Limits, memory_s: float, *, prompts: bool, decodes: bool):
        """memory_s: time over which rates are averaged."""
        self.costs = EngineCosts()  # as last reported
        self._last = Demand()
        self._limits = limits
        self._sizing = Sizing(slo, limits.max_num_seqs, prompts=prompts, decodes=decodes)
        self._stabilizer = Stabilizer(limits.upscale_delay_s, limits.downscale_delay_s)
        self._tokens, self._cached, self._prefills, self._output = (Mean(memory_s) for _ in range(4))
        self._busy_at: float | None = None

    def decide(self, load: PoolLoad, now: float, spilled_prefill_share: float = 0.0) -> ScalingDecision:
        """Decide on the number of replicas. spilled_prefill_share: engine-seconds per second that other engines spend
        on prompts that are this pool's responsibility."""
        demand, current = self._demand(load, now, spilled_prefill_share), load.target_replicas
        self._last = demand
        starting = current > 0 and not load.running_replicas
        busy = load.busy or starting or spilled_prefill_share >= WAKE_FRACTION
        if busy or self._busy_at is None:  # a new pool counts as busy, so that it is not removed at once
            self._busy_at, busy = now, True
        idle_s = now - self._busy_at
        if not self._limits.min_replicas and not busy and (not current or idle_s >= self._limits.scale_to_zero_delay_s):
            size, stable = Size(0, "idle"), 0
        elif not current:
            size, stable = Size(1, "wake"), 1
        else:
            size = self._size(demand, current)
            size = Size(1, "wake") if starting and size.replicas == 1 else size
            wished = size.replicas if busy else min(size.replicas, current)  # old rates are no reason to grow
            stable = self._stabilizer.stabilize(wished, current, now)
            stable = min(stable, max(current, MAX_GROWTH * load.running_replicas))
        replicas = min(max(stable, self._limits.min_replicas), self._limits.max_replicas)
        return ScalingDecision(replicas, size.replicas, size.reason, self._inputs(demand, load))

    def pressure(self, replicas: int) -> float:
        return max(self._sizing.used(self._last, replicas).values()) if replicas else math.inf

    def _size(self, demand: Demand, current: int) -> Size:
        """Return the required size. It grows only if the current sequences need more replicas, and shrinks only if the
        current tokens per second need fewer."""
        max_replicas = self._limits.max_replicas
        size, if_fewer = self._sizing.now(demand, max_replicas), self._sizing.if_fewer(demand, max_replicas)
        if size.replicas >= min(if_fewer.replicas, current):
            return size
        return Size(min(if_fewer.replicas, current), if_fewer.reason)

    def _demand(self, load: PoolLoad, now: float, spilled_prefill_share: float) -> Demand:
        replicas = load.replicas
        self.costs = costs = _mean_costs(load, self.costs)
        tokens = self._tokens.add(sum(r.prefill_tokens_per_s for r in replicas), now)
        cached = self._cached.add(sum(r.cached_tokens_per_s for r in replicas), now)
        prefills = self._prefills.add(sum(r.prefills_per_s for r in replicas), now)
        misses = max(MIN_MISS_FRACTION, tokens / (tokens + cached)) if tokens + cached > 0 else 1.0
        running = sum(r.running for r in replicas)
        used = sum(r.blocks_used / r.blocks_total for r in replicas)
        return Demand(
            sequences=load.sequences,
            output_tokens_per_s=self._output.add(sum(r.output_tokens_per_s for r in replicas), now),
            decode_step_s=costs.decode_step_s,
            decode_sequence_s=costs.decode_sequence_s,
            prefill_share=tokens * costs.token_s + spilled_prefill_share,
            backlog_s=load.queued_tokens * misses * costs.token_s,
            prompt_s=tokens / prefills * costs.token_s if prefills > 0 else 0.0,
            kv_replicas=used * load.sequences / running if running else used,
        )

    def _inputs(self, demand: Demand, load: PoolLoad) -> dict[str, float]:
        """Return the figures for the log and for metrics; times in seconds."""
        up = max(1, load.running_replicas)
        observed = [r for r in load.replicas if r.itl_s > 0]
        return {
            **asdict(demand),
            "running_replicas": load.running_replicas,
            "queue_delay_s": demand.backlog_s / up,
            "prefill_share_limit": self._sizing.prefill_limit(demand.prompt_s),
            "kv_use": demand.kv_replicas / up,
            "itl_s": sum(r.itl_s for r in observed) / len(observed) if observed else 0.0,
            **{f"{limit}_of_limit": ratio for limit, ratio in self._sizing.used(demand, up).items()},
        }


def _mean_costs(load: PoolLoad, known: EngineCosts) -> EngineCosts:
    """Return the mean costs of the replicas that know them. A cost that no replica knows is taken from `known`."""
    costs = [r.costs for r in load.replicas]
    steps = [c for c in costs if c.decode_step_s > 0 or c.decode_sequence_s > 0] or [known]
    tokens = [c.token_s for c in costs if c.token_s > 0] or [known.token_s]
    return EngineCosts(
        decode_step_s=sum(c.decode_step_s for c in steps) / len(steps),
        decode_sequence_s=sum(c.decode_sequence_s for c in steps) / len(steps),
        token_s=sum(tokens) / len(tokens),
    )


# -- smoothing -----------------------------------------------------------------------------------------------


class Mean:
    """Mean of a rate, with exponentially fading weights. The first value becomes the mean."""

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._at: float | None = None
        self.value = 0.0

    def add(self, value: float, now: float) -> float:
        """Add a value, and return the new mean."""
        if self._at is None:
            self.value = value
        else:
            self.value += (value - self.value) * -math.expm1(-max(0.0, now - self._at) / self._memory_s)
        self._at = now
        return self.value


class Stabilizer:
    """Rises only to the minimum desired during the last `up_s`, and falls only to the maximum desired during the last
    `down_s`, like Kubernetes' HorizontalPodAutoscaler."""

    def __init__(self, up_s: float, down_s: float):
        self._up_s, self._down_s = up_s, down_s
        self._history: deque[tuple[float, int]] = deque()  # (time, desired replicas)

    def stabilize(self, desired: int, current: int, now: float) -> int:
        if not self._history:
            self._history.append((now, current))
        self._history.append((now, desired))
        while self._history[0][0] < now - max(self._up_s, self._down_s):
            self._history.popleft()
        up = min([desired, *(n for at, n in self._history if at > now - self._up_s)])
        down = max([desired, *(n for at, n in self._history if at > now - self._down_s)])
        return min(max(current, up), down)
