"""Calculates how many replicas a load needs. Pure Python; docs/autoscaling.md derives the formulas."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.autoscaling.slo import Slo

TARGET_FRACTION = 0.9  # of a limit is planned with, since new replicas take time to come
MAX_KV_FRACTION = 0.9  # of the KV blocks may be held by requests; above, they preempt each other
SCALE_DOWN_MARGIN = 0.9  # of the same limits must suffice for fewer replicas: in between, the number stays
MIN_PREFILL_FRACTION, MAX_PREFILL_FRACTION = 0.3, 0.85  # of an engine's time; the TTFT target decides in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The work that all replicas of a pool have to do together."""

    sequences: float = 0.0  #: in the engines, and waiting for them
    output_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0  #: a decode step of n sequences takes this, and ...
    decode_sequence_s: float = 0.0  #: ... n times this
    prefill_share: float = 0.0  #: engine-seconds per second that computing prompts takes
    backlog_s: float = 0.0  #: engine-seconds of the queued prompts
    prompt_s: float = 0.0  #: engine-seconds of a mean prompt
    kv_replicas: float = 0.0  #: KV blocks in use, and soon to be by waiting sequences, in replicas' worth of blocks


@dataclass(frozen=True, slots=True)
class Size:
    """A number of replicas, and why it is not smaller."""

    replicas: int
    reason: str = "min"  #: the limit that one replica less would break; `min` for one replica


class Sizing:
    """Sizes one pool. prompts: whether the TTFT target is its business. decodes: whether the ITL target is."""

    def __init__(self, slo: Slo, max_num_seqs: int, *, prompts: bool, decodes: bool):
        self._ttft_s, self._itl_s = slo.ttft_ms / 1000, slo.itl_ms / 1000
        self._max_num_seqs, self._prompts, self._decodes = max_num_seqs, prompts, decodes

    def now(self, demand: Demand, max_replicas: int) -> Size:
        """Size the pool for the present sequences, shared evenly."""
        return self._fewest(demand, max_replicas, demand.sequences, 1.0)

    def if_fewer(self, demand: Demand, max_replicas: int) -> Size:
        """Size the pool for the present tokens per second.

        Fewer replicas make slower steps, so the same stream of requests has more of them in flight at a time (Little's
        law). What `now` says after taking a replica away may be the opposite of what it said before; this does not.
        """
        return self._fewest(demand, max_replicas, None, SCALE_DOWN_MARGIN)

    def prefill_limit(self, prompt_s: float) -> float:
        """Return the fraction of an engine's time that prompts may take while a prompt of `prompt_s` waits no longer
        than the TTFT target leaves: in an M/M/1 queue at load x it waits prompt_s * x / (1 - x)."""
        if prompt_s <= 0:
            return MAX_PREFILL_FRACTION
        slack = max(0.0, self._ttft_s - prompt_s) / prompt_s
        return min(max(slack / (1 + slack), MIN_PREFILL_FRACTION), MAX_PREFILL_FRACTION)

    def _fewest(self, demand: Demand, max_replicas: int, sequences: float | None, margin: float) -> Size:
        reason = "min"
        for replicas in range(1, max_replicas + 1):
            broken = self._broken(demand, replicas, sequences, margin)
            if not broken:
                return Size(replicas, reason)
            reason = broken
        return Size(max_replicas, reason)

    def _broken(self, demand: Demand, replicas: int, sequences: float | None, margin: float) -> str:
        """Return the first limit that this many replicas would break; empty if none. margin: factor on each limit."""
        if self._prompts:
            if demand.prefill_share / replicas > margin * self.prefill_limit(demand.prompt_s):
                return "ttft"
            if demand.backlog_s / replicas > margin * max(self._ttft_s - demand.prompt_s, self._ttft_s / 2):
                return "queue"
        if not self._decodes:
            return "kv" if demand.kv_replicas / replicas > margin * MAX_KV_FRACTION else ""
        if sequences is None:
            in_flight, step_s = self._steady(demand, replicas)
        else:
            in_flight, step_s = sequences, self._step_s(demand, replicas, sequences)
        max_step_s = margin * TARGET_FRACTION * self._itl_s
        if step_s > max_step_s >= demand.decode_step_s + demand.decode_sequence_s:
            return "itl"  # unless even a single sequence misses the target: more replicas would not help it
        if in_flight / replicas > margin * TARGET_FRACTION * self._max_num_seqs:
            return "slots"
        growth = max(1.0, in_flight / demand.sequences) if demand.sequences else 1.0
        return "kv" if growth * demand.kv_replicas / replicas > margin * MAX_KV_FRACTION else ""

    def _step_s(self, demand: Demand, replicas: int, sequences: float) -> float:
        """Seconds from token to token: a decode step, in the time that computing prompts leaves."""
        at_once = min(sequences / replicas, self._max_num_seqs)
        left = max(1 - demand.prefill_share / replicas, 1 - MAX_PREFILL_FRACTION)
        return (demand.decode_step_s + demand.decode_sequence_s * at_once) / left

    def _steady(self, demand: Demand, replicas: int) -> tuple[float, float]:
        """Sequences in flight and step time, once a stream of as many tokens per second has settled."""
        load = (demand.prefill_share + demand.decode_sequence_s * demand.output_tokens_per_s) / replicas
        if load >= 1:
            return float("inf"), float("inf")
        step_s = demand.decode_step_s / (1 - load)
        return demand.output_tokens_per_s * step_s, step_s
