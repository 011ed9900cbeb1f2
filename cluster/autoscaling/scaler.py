"""The scaling of a model's pools. Pure Python: whoever calls brings the time, in seconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from cluster.autoscaling.sizing import Demand, Size, Sizing
from cluster.autoscaling.slo import Limits, Slo
from deployments.routing.config import Role

MEMORY_S = 10.0  # of rates: prompts come in lumps
MAX_GROWTH = 2  # times the replicas that are up, at once; what more is needed shows when those have come
MIN_MISS_FRACTION = 0.1  # share of queued prompt tokens taken to be uncached, however well the cache does
WAKE_FRACTION = 0.05  # of an engine's time, from which prompts that others compute are worth starting one


# -- what the policy sees ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What a step costs in an engine, fitted there (engine/core/step_cost.py); 0 where not known yet.

    A step of n decoding sequences takes decode_step_s + n * decode_sequence_s. token_s: of each prompt token, all told.
    """

    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica now; its rates are over the last few seconds.

    running: sequences that hold KV. waiting: in the engine's queue, or with their prompt in another engine.
    queued_tokens: prompt tokens that are still to be computed here.
    prefill_tokens_per_s: prompt tokens computed here. cached_tokens_per_s: those that the prefix cache spared.
    prefills_per_s: prompts that were computed to their end here.
    spilled_fraction: of them, those that a prefill pool would have computed, had it had room.
    output_tokens_per_s: generated. itl_s: mean time between two tokens of a sequence; 0 without any.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    cached_tokens_per_s: float = 0.0
    prefills_per_s: float = 0.0
    spilled_fraction: float = 0.0
    output_tokens_per_s: float = 0.0
    itl_s: float = 0.0
    blocks_used: int = 0
    blocks_total: int = 1
    costs: EngineCosts = EngineCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """All replicas of a pool.

    running_replicas: that are up, also where one has not reported yet. replicas: those that have.
    waiting, waiting_tokens: sequences that wait in front of the pool, in ingresses, and tokens of their prompts.
    """

    running_replicas: int
    replicas: Sequence[ReplicaLoad]
    waiting: int = 0
    waiting_tokens: int = 0

    @property
    def sequences(self) -> int:
        """Those that run, and those that would if there was room."""
        return self.waiting + sum(r.running + r.waiting for r in self.replicas)

    @property
    def queued_tokens(self) -> int:
        return self.waiting_tokens + sum(r.queued_tokens for r in self.replicas)

    @property
    def busy(self) -> bool:
        return self.sequences > 0 or self.queued_tokens > 0 or any(r.prefills_per_s for r in self.replicas)


# -- decisions ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """replicas: that there should be from now on. desired: that the load of now asks for, before delays and bounds.
    reason: the limit that fewer would break (ttft, queue, itl, slots, kv), `idle`, `wake`, or `least` where one replica
    is enough. inputs: what it was decided by."""

    replicas: int
    desired: int
    reason: str
    inputs: dict[str, float] = field(default_factory=dict)


class PoolScaler:
    """prompts: whether this pool answers for the time to the first token. decodes: whether it generates."""

    def __init__(self, slo: Slo, limits: Limits, *, prompts: bool, decodes: bool):
        self._limits = limits
        self._sizing = Sizing(slo, limits.max_num_seqs, prompts=prompts, decodes=decodes)
        self._stabilizer = Stabilizer(limits.upscale_delay_s, limits.downscale_delay_s)
        self._costs = EngineCosts()
        self._tokens, self._cached, self._prefills, self._output = (Mean(MEMORY_S) for _ in range(4))
        self._busy_at: float | None = None

    @property
    def costs(self) -> EngineCosts:
        """As last reported."""
        return self._costs

    def decide(self, load: PoolLoad, current: int, now: float, spilled_prefill_share: float = 0.0) -> ScalingDecision:
        """current: replicas that there should be so far. spilled_prefill_share: engine-seconds per second that other
        engines spend on prompts that are this pool's business."""
        demand = self._demand(load, now, spilled_prefill_share)
        starting = current > 0 and not load.running_replicas
        busy = load.busy or starting or spilled_prefill_share >= WAKE_FRACTION
        if busy or self._busy_at is None:  # also at the start: whatever is new gets its time to prove useful
            self._busy_at, busy = now, True
        idle_s = now - self._busy_at
        if not self._limits.min_replicas and not busy and (not current or idle_s >= self._limits.scale_to_zero_delay_s):
            size, settled = Size(0, "idle"), 0
        elif not current:
            size, settled = Size(1, "wake"), 1
        else:
            size = self._size(demand, current)
            size = Size(1, "wake") if starting and size.replicas == 1 else size
            settled = self._settle(size.replicas, load.running_replicas, current, now)
        replicas = min(max(settled, self._limits.min_replicas), self._limits.max_replicas)
        return ScalingDecision(replicas, size.replicas, size.reason, self._inputs(demand, load))

    def _size(self, demand: Demand, current: int) -> Size:
        """More only if the sequences of now need it; fewer only if the tokens per second of now allow it."""
        max_replicas = self._limits.max_replicas
        size, if_fewer = self._sizing.now(demand, max_replicas), self._sizing.if_fewer(demand, max_replicas)
        if size.replicas >= min(if_fewer.replicas, current):
            return size
        return Size(min(if_fewer.replicas, current), if_fewer.reason)

    def _settle(self, desired: int, running: int, current: int, now: float) -> int:
        settled = self._stabilizer.settle(desired, current, now)
        return min(settled, max(current, MAX_GROWTH * running))

    def _demand(self, load: PoolLoad, now: float, spilled_prefill_share: float) -> Demand:
        replicas = load.replicas
        self._costs = costs = _mean_costs(load, self._costs)
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
        """For the log and for metrics; times in seconds."""
        up = max(1, load.running_replicas)
        observed = [r for r in load.replicas if r.itl_s > 0]
        return {
            **asdict(demand),
            "running_replicas": load.running_replicas,
            "queue_delay_s": demand.backlog_s / up,
            "prefill_share_limit": self._sizing.prefill_limit(demand.prompt_s),
            "kv_use": demand.kv_replicas / up,
            "itl_s": sum(r.itl_s for r in observed) / len(observed) if observed else 0.0,
        }


def _mean_costs(load: PoolLoad, known: EngineCosts) -> EngineCosts:
    """Over the replicas that know theirs; what nobody knows now stays as it was."""
    costs = [r.costs for r in load.replicas]
    steps = [c for c in costs if c.decode_step_s > 0 or c.decode_sequence_s > 0] or [known]
    tokens = [c.token_s for c in costs if c.token_s > 0] or [known.token_s]
    return EngineCosts(
        decode_step_s=sum(c.decode_step_s for c in steps) / len(steps),
        decode_sequence_s=sum(c.decode_sequence_s for c in steps) / len(steps),
        token_s=sum(tokens) / len(tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """current: replicas that there should be so far."""

    load: PoolLoad
    current: int


class ModelScaler:
    """A pool that answers requests, and perhaps one that computes prompts for it.

    Without a prefill pool, the first one answers for the time to the first token as well.
    """

    def __init__(self, slo: Slo, limits: dict[Role, Limits]):
        """limits: of all its pools. One of a fixed size has min_replicas equal to max_replicas."""
        alone = "prefill" not in limits
        self._scalers = {
            role: PoolScaler(slo, limit, prompts=alone or role == "prefill", decodes=role == "decode")
            for role, limit in limits.items()
        }

    def decide(self, pools: dict[Role, PoolState], now: float) -> dict[Role, ScalingDecision]:
        """One decision per pool of `pools`."""
        decisions: dict[Role, ScalingDecision] = {}
        for role, pool in pools.items():
            spilled = self._spilled_prefill_share(pools) if role == "prefill" else 0.0
            decisions[role] = self._scalers[role].decide(pool.load, pool.current, now, spilled)
        return decisions

    def _spilled_prefill_share(self, pools: dict[Role, PoolState]) -> float:
        """Engine-seconds per second that decode replicas spend on prompts for which the prefill pool had no room."""
        if "decode" not in pools:
            return 0.0
        token_s = self._scalers["prefill"].costs.token_s or self._scalers["decode"].costs.token_s
        spilled_per_s = sum(r.prefill_tokens_per_s * r.spilled_fraction for r in pools["decode"].load.replicas)
        return spilled_per_s * token_s


# -- smoothing ----------------------------------------------------------------------


class Mean:
    """Of a rate, with exponentially fading weights. The first value counts as if it had always been so."""

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._at: float | None = None
        self.value = 0.0

    def add(self, value: float, now: float) -> float:
        """The mean after it."""
        if self._at is None:
            self.value = value
        else:
            self.value += (value - self.value) * -math.expm1(-max(0.0, now - self._at) / self._memory_s)
        self._at = now
        return self.value


class Stabilizer:
    """Moves up to the least that was wished for during the last `up_s`, and down to the most that was wished for during
    the last `down_s`, as Kubernetes' HorizontalPodAutoscaler does."""

    def __init__(self, up_s: float, down_s: float):
        self._up_s, self._down_s = up_s, down_s
        self._history: deque[tuple[float, int]] = deque()  # (when, how many)

    def settle(self, desired: int, current: int, now: float) -> int:
        if not self._history:
            self._history.append((now, current))
        self._history.append((now, desired))
        while self._history[0][0] < now - max(self._up_s, self._down_s):
            self._history.popleft()
        up = min([desired, *(n for at, n in self._history if at > now - self._up_s)])
        down = max([desired, *(n for at, n in self._history if at > now - self._down_s)])
        return min(max(current, up), down)
