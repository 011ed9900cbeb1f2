"""Replicas as a fluid, second by second, for the policy to scale: enough to see whether it settles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cluster.autoscaling.scaler import EngineCosts, ModelScaler, PoolLoad, ReplicaLoad, ScalingDecision
from cluster.autoscaling.slo import Limits, Slo

BUSIEST = 0.95  # share of its time that an engine gives to prompts at most


@dataclass(frozen=True)
class Traffic:
    """requests_per_s come, whoever else is there; or `clients` ask again as soon as they are answered."""

    requests_per_s: float = 0.0
    clients: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 100


class World:
    """One pool that does everything."""

    def __init__(
        self,
        slo: Slo,
        *,
        costs: EngineCosts = EngineCosts(decode_step_s=0.01, decode_sequence_s=0.0005, token_s=0.0002),  # noqa: B008  frozen
        replicas: int = 1,
        min_replicas: int = 1,
        max_num_seqs: int = 64,
        blocks_per_sequence: int = 1,
        downscale_delay_s: float = 60.0,
        startup_s: int = 10,
    ):
        limits = Limits(
            min_replicas=min_replicas,
            max_replicas=50,
            max_num_seqs=max_num_seqs,
            upscale_delay_s=3.0,
            downscale_delay_s=downscale_delay_s,
            scale_to_zero_delay_s=30.0,
        )
        self.costs, self.wanted, self.up, self.now = costs, replicas, replicas, 0.0
        self.step_s = costs.decode_step_s
        self.sequences = self.backlog_tokens = 0.0
        self.history: list[int] = []
        self._blocks, self._max_num_seqs, self._startup_s = blocks_per_sequence, max_num_seqs, startup_s
        self._starting: list[float] = []
        self._scaler = ModelScaler(slo, {"decode": limits})

    def run(self, traffic: Traffic, seconds: int) -> None:
        for _ in range(seconds):
            self._second(traffic)

    def changes(self, last_s: int) -> int:
        """Count the changes of the wanted replicas within the last seconds."""
        return sum(a != b for a, b in pairwise(self.history[-last_s:]))

    def _second(self, traffic: Traffic) -> None:
        self.now += 1
        self.up += sum(at <= self.now for at in self._starting)
        self._starting = [at for at in self._starting if at > self.now]
        up = max(self.up, 1)  # requests wait while there is none
        rate = traffic.requests_per_s
        if traffic.clients:
            self.sequences, rate = float(traffic.clients), 0.0
        in_engines = min(self.sequences, self.up * self._max_num_seqs)
        could = self.up * BUSIEST / self.costs.token_s
        prefill_tokens = min(self.backlog_tokens + rate * traffic.prompt_tokens, could)
        self.backlog_tokens += rate * traffic.prompt_tokens - prefill_tokens
        decode_time = self.up - prefill_tokens * self.costs.token_s
        output = 0.0
        if in_engines and decode_time > 0:
            per_step = self.costs.decode_step_s + self.costs.decode_sequence_s * in_engines / up
            self.step_s = per_step / (decode_time / up)
            output = in_engines / self.step_s
        if not traffic.clients:
            self.sequences = max(0.0, self.sequences + rate - min(output / traffic.output_tokens, self.sequences))
        replica = ReplicaLoad(
            running=round(in_engines / up),
            queued_tokens=round(self.backlog_tokens / up),
            prefill_tokens_per_s=prefill_tokens / up,
            prefills_per_s=prefill_tokens / traffic.prompt_tokens / up if traffic.prompt_tokens else 0.0,
            output_tokens_per_s=output / up,
            blocks_used=round(in_engines / up) * self._blocks,
            blocks_total=1000,
            costs=self.costs,
        )
        load = PoolLoad(
            target_replicas=self.wanted,
            running_replicas=self.up,
            replicas=[replica] * self.up,
            waiting=round(self.sequences - in_engines),
        )
        self._scale(self._scaler.decide({"decode": load}, self.now)["decode"])

    def _scale(self, decision: ScalingDecision) -> None:
        more = decision.replicas - self.wanted
        self._starting += [self.now + self._startup_s] * more
        for _ in range(-more):
            if self._starting:
                self._starting.pop()
            else:
                self.up -= 1
        self.wanted = decision.replicas
        self.history.append(self.wanted)
