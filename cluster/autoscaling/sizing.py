"""Computes how many replicas a load requires. Pure Python; docs/autoscaling.md derives the formulas."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.autoscaling.slo import Slo

TARGET_FRACTION = 0.9  # of each limit is used for planning, since new replicas take time to start
MAX_KV_FRACTION = 0.9  # of the KV blocks may be in use; above that, requests preempt each other
SCALE_DOWN_MARGIN = 0.9  # of the same limits must suffice before replicas are removed
MIN_PREFILL_FRACTION, MAX_PREFILL_FRACTION = 0.3, 0.85  # bounds of an engine's time for prompts; see prefill_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Work for all replicas of a pool together."""

    sequences: float = 0.0  #: sequences in the engines, and waiting for them
    output_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0  #: fixed seconds of a decode step
    decode_sequence_s: float = 0.0  #: further seconds of a decode step per sequence
    prefill_share: float = 0.0  #: engine-seconds per second for computing prompts
    backlog_s: float = 0.0  #: engine-seconds for the queued prompts
    prompt_s: float = 0.0  #: engine-seconds for a mean prompt
    kv_replicas: float = 0.0  #: KV blocks in use, or soon needed by waiting sequences, divided by a replica's blocks


@dataclass(frozen=True, slots=True)
class Size:
    """A number of replicas, and why fewer do not suffice."""

    replicas: int
    reason: str = "min"  #: limit that one replica less would break; `min` for a single replica


class Sizing:
    """Sizes one pool. prompts: whether it must meet the TTFT target. decodes: whether it must meet the ITL target."""

    def __init__(self, slo: Slo, max_num_seqs: int, *, prompts: bool, decodes: bool):
        self._ttft_s, self._itl_s = slo.ttft_ms / 1000, slo.itl_ms / 1000
        self._max_num_seqs, self._prompts, self._decodes = max_num_seqs, prompts, decodes

    def now(self, demand: Demand, max_replicas: int) -> Size:
        """Return the size for the current sequences, evenly distributed."""
        return self._fewest(demand, max_replicas, demand.sequences, 1.0)

    def if_fewer(self, demand: Demand, max_replicas: int) -> Size:
        """Return the size for the current tokens per second.

        On fewer replicas, steps are slower, so the same stream has more requests in flight (Little's law). Sizing by
        `now` could therefore remove a replica and then ask for it again; this method counts those additional requests.
        """
        return self._fewest(demand, max_replicas, None, SCALE_DOWN_MARGIN)

    def used(self, demand: Demand, replicas: int) -> dict[str, float]:
        """Return the ratio of load to limit on this many replicas, for each limit; above 1, `now` asks for more. `itl`
        is missing if even a single sequence misses the target."""
        used = {"kv": demand.kv_replicas / replicas / MAX_KV_FRACTION}
        if self._prompts:
            used["ttft"] = demand.prefill_share / replicas / self.prefill_limit(demand.prompt_s)
            used["queue"] = demand.backlog_s / replicas / max(self._ttft_s - demand.prompt_s, self._ttft_s / 2)
        if self._decodes:
            used["slots"] = demand.sequences / replicas / (TARGET_FRACTION * self._max_num_seqs)
            max_step_s = TARGET_FRACTION * self._itl_s
            if max_step_s >= demand.decode_step_s + demand.decode_sequence_s:
                used["itl"] = self._step_s(demand, replicas, demand.sequences) / max_step_s
        return used

    def prefill_limit(self, prompt_s: float) -> float:
        """Return the fraction of an engine's time that prompts may take so that a prompt of `prompt_s` waits no longer
        than the TTFT target allows: in an M/M/1 queue at load x it waits prompt_s * x / (1 - x)."""
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
        """Return the first limit that this many replicas would break, or "". margin: factor on each limit."""
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
            return "itl"  # not reached if even a single sequence misses the target, which more replicas would not help
        if in_flight / replicas > margin * TARGET_FRACTION * self._max_num_seqs:
            return "slots"
        growth = max(1.0, in_flight / demand.sequences) if demand.sequences else 1.0
        return "kv" if growth * demand.kv_replicas / replicas > margin * MAX_KV_FRACTION else ""

    def _step_s(self, demand: Demand, replicas: int, sequences: float) -> float:
        """Return the seconds between tokens: the time of a decode step, stretched by the share of time that prompts
        take."""
        at_once = min(sequences / replicas, self._max_num_seqs)
        left = max(1 - demand.prefill_share / replicas, 1 - MAX_PREFILL_FRACTION)
        return (demand.decode_step_s + demand.decode_sequence_s * at_once) / left

    def _steady(self, demand: Demand, replicas: int) -> tuple[float, float]:
        """Return the sequences in flight and the step time in the steady state of a stream with the same tokens per
        second."""
        load = (demand.prefill_share + demand.decode_sequence_s * demand.output_tokens_per_s) / replicas
        if load >= 1:
            return float("inf"), float("inf")
        step_s = demand.decode_step_s / (1 - load)
        return demand.output_tokens_per_s * step_s, step_s
