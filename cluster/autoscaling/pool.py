"""The scaling of one pool of replicas. Pure Python: whoever calls brings the time, in seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from cluster.autoscaling.load import EngineCosts, PoolLoad
from cluster.autoscaling.sizing import Demand, Size, Sizing
from cluster.autoscaling.smoothing import Mean, Stabilizer
from cluster.autoscaling.targets import Limits, Slo

MEMORY_S = 10.0  # of rates: prompts come in lumps
MAX_GROWTH = 2  # times the replicas that are up, at once; what more is needed shows when those have come
MIN_MISS_FRACTION = 0.1  # share of queued prompt tokens taken to be uncached, however well the cache does
WAKE_FRACTION = 0.05  # of an engine's time, from which prompts that others compute are worth starting one


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
