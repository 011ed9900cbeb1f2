"""Divides an engine's time among its requests. Pure Python: no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from engine.core.loop_observer import EndedStep, LoopObserver
from engine.core.output import Event
from engine.core.request import Request
from engine.costs.block_usage import BlockUsage
from engine.costs.request_cost import KVCost, cost_of
from engine.costs.step_cost import StepTimes, StepWork
from engine.costs.units import GIB_NS, nanoseconds
from engine.wire.parts.costs import CostStats, SequenceCost
from engine.wire.plan import StepPlan
from engine.wire.remote_request import NOBODY

if TYPE_CHECKING:
    from engine.costs.tier_usage import TierUsage

SUMS = 8  # blocks whose time is summed for each token of a request that reports its cost

CostLine = Literal["requests", "preemption", "replay", "handoff", "overhead", "stalled", "idle"]
"""What an engine's time was spent on:
requests    steps, as far as they advanced a request
preemption  tokens computed again after the request was preempted
replay      tokens computed again because the engine of a request was lost, or the KV of a request that moved
handoff     prompts computed for another engine that has not read their KV
overhead    a step was planned and none computed, or a step computed tokens of requests that had already ended
stalled     requests waited for a grammar, an adapter, or KV from elsewhere, or their KV for another engine to read it
idle        there were no requests"""


class CostLedger(LoopObserver):
    """Accounts for every nanosecond since the start of an engine. Each belongs to one CostLine, and each nanosecond of
    a step also to one request.

    Rows of prompts and rows with drafts share a step by their learned costs (StepTimes). The other rows decode one
    token each and share equally, so they are charged like the references to a block (BlockUsage): a step whose decodes
    are those of the step before costs the same, however many there are.
    """

    def __init__(
        self,
        times: StepTimes,
        usages: Sequence[BlockUsage],
        block_bytes: Sequence[int],
        now: float,
        tiers: Sequence[TierUsage] = (),
    ):
        """usages: of the pool of each KV cache group. block_bytes: bytes of a block of each group, on all ranks
        together. now: seconds, as in all other methods. tiers: the usage of the tiers below. The time of blocks is
        measured by the same clock: it is that of the newest call of `spent` or `step`."""
        self.times, self.block_usages, self.block_bytes = times, usages, block_bytes
        self._usages: list[BlockUsage | TierUsage] = [*usages, *tiers]
        self._started_ns = self._mark_ns = nanoseconds(now)
        self.ns: dict[CostLine, int] = dict.fromkeys(get_args(CostLine), 0)
        self._decodes: list[Request] | None = None  # of the newest step, unless one has left them
        #: What one decode had cost since the start when each of them joined.
        self._joined: dict[Request, int] = {}
        self._per_decode_ns = self._carried_ns = 0
        self._reporting: set[Request] = set()  # those whose deltas tell their costs, once a step has computed them
        self.spent("idle", now)

    @property
    def wall_ns(self) -> int:
        """Nanoseconds from the start to the newest time that has been accounted for."""
        return self._mark_ns - self._started_ns

    def spent(self, line: CostLine, until: float) -> int:
        """Account for the time until `until`, and return it in nanoseconds."""
        now_ns = max(self._mark_ns, nanoseconds(until))
        elapsed, self._mark_ns = now_ns - self._mark_ns, now_ns
        self.ns[line] += elapsed
        for usage in self._usages:
            usage.now_ns = now_ns
        return elapsed

    def rested(self, until: float, *, stalled: bool) -> None:
        self.spent("stalled" if stalled else "idle", until)

    def stepped(self, step: EndedStep) -> None:
        self.step(StepWork.of(step.plan), step.plan, step.requests, step.began_at, step.ended_at)

    def step(self, work: StepWork, plan: StepPlan, requests: list[Request], began_at: float, ended_at: float) -> None:
        """Account for a step, and divide it among its requests. requests: those of the plan's entries."""
        self.spent("overhead", began_at)
        step_ns = self.spent("requests", ended_at)
        if work.decodes == len(requests) and not plan.drafts:
            self._decode(requests, step_ns, self._join(requests))
            return
        weights = self._weights(plan, work)
        total, weight, charged = sum(weights), 0, 0
        decodes = [request for i, request in enumerate(requests) if not weights[i]]
        new = self._join(decodes)
        for i, (request, start, count) in enumerate(zip(requests, plan.starts, plan.counts, strict=True)):
            if not weights[i]:
                continue
            weight += weights[i]
            upto = step_ns * weight // total
            self._charge(request, start, count, upto - charged)
            charged = upto
        if decodes:
            self._decode(decodes, step_ns - charged, new)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each line."""
        return {line: ns / 1e9 for line, ns in self.ns.items()}

    @property
    def kv_gib_s(self) -> float:
        """Gibibytes of KV cache times the seconds for which they were used, on all ranks."""
        return sum(use.used_ns * size for use, size in zip(self.block_usages, self.block_bytes, strict=True)) / GIB_NS

    def of(self, request: Request) -> int:
        """Return the steps' time that a request has been charged with, in nanoseconds."""
        cost = cost_of(request)
        unpaid = 0 if cost.closed else self._per_decode_ns - self._joined.get(request, self._per_decode_ns)
        return cost.compute_ns + unpaid

    def record(self) -> CostStats:
        return CostStats(self.seconds, self.kv_gib_s)

    def report(self, events: list[Event]) -> list[Event]:
        """Return the events with the costs of requests that end, and of those that report them. Closes the accounts of
        requests that end: what steps still compute for them is overhead."""
        for i in [i for i, event in enumerate(events) if event.delta.finish_reason]:
            self._close(events[i])
            events[i] = self._with_cost(events[i])
        if self._reporting:
            for i, event in enumerate(events):
                if event.request in self._reporting:
                    events[i] = self._with_cost(event)
        return events

    def _close(self, event: Event) -> None:
        request, cost = event.request, cost_of(event.request)
        self._reporting.discard(request)
        if request in self._joined:
            self._leave(request)
            self._decodes = None
        of_other_engine = request.asked_by is not None and request.asked_by.decode is not NOBODY  # else it only moves
        if of_other_engine and not cost.closed and event.delta.finish_reason != "length":
            unpaid_ns = max(0, cost.compute_ns - cost.paid_ns)
            self._move("handoff", unpaid_ns)
            cost.wasted_ns, cost.compute_ns = cost.wasted_ns + unpaid_ns, cost.compute_ns - unpaid_ns
        cost.closed = True

    def _with_cost(self, event: Event) -> Event:
        request, cost = event.request, cost_of(event.request)
        if event.delta.finish_reason or len(request.tokens) >= cost.kv.next_sum:
            self._sum_kv(request)
        byte_ns = cost.kv.byte_ns + cost.kv.num_bytes * (self._mark_ns - cost.kv.at_ns)
        byte_ns += cost.remote_byte_ns + cost.coming.byte_ns
        compute_s = (self.of(request) + cost.remote_ns + cost.coming.compute_ns) / 1e9
        below = sum(account.block_ns for account in cost.tiers.values()) / GIB_NS if cost.tiers else 0.0
        paid = SequenceCost(compute_s, cost.wasted_ns / 1e9, byte_ns / GIB_NS, below)
        return Event(request, event.delta.telling(paid))

    def _sum_kv(self, request: Request) -> None:
        """Sum what a request's blocks have cost. That takes time for each block, so it is done again only after
        1 / SUMS as many tokens; until then, the request is assumed to hold the same blocks."""
        byte_ns = num_bytes = 0.0
        num_blocks = 0
        cost = cost_of(request)
        for group, account in cost.blocks.items():
            usage = self.block_usages[group]
            held = usage.held(request)
            byte_ns += self.block_bytes[group] * usage.block_time(account, held)
            num_bytes += self.block_bytes[group] * usage.share(held)
            num_blocks += len(held)
        next_sum = len(request.tokens) + 1 + num_blocks // SUMS
        cost.kv = KVCost(byte_ns, num_bytes, self._mark_ns, next_sum)

    # -- shares --------------------------------------------------------------------------------------------

    def _weights(self, plan: StepPlan, work: StepWork) -> list[int]:
        """Return the weight of each row: 0 for decodes without drafts, which get the rest of the step; and last, as one
        more row, the weight of all these together."""
        per_step, per_sequence = self.times.by_sequences.coefficients
        token_ns = nanoseconds(self.times.prompt_token_s)
        known = bool(token_ns and (per_step or per_sequence))
        if not known:
            token_ns, per_step, per_sequence = 1000, 0.0, 1e-6
        draft_ns = 1000 if not known else nanoseconds(self.times.by_tokens.coefficients[1])
        decode_ns = 1 + nanoseconds(per_sequence + per_step / max(1, work.decodes))
        weights, decodes = [], 0
        for i, (count, samples) in enumerate(zip(plan.counts, plan.samples, strict=True)):
            if i in plan.drafts:
                weights.append(decode_ns + draft_ns * (count - 1))
            elif samples and count == 1:
                weights.append(0)
                decodes += 1
            else:
                weights.append(token_ns * count)
        return [*weights, decode_ns * decodes]

    def _charge(self, request: Request, start: int, count: int, share: int) -> None:
        """Charge a request with the computation of `count` tokens. What was known before is not its fault."""
        cost = cost_of(request)
        if cost.closed:
            self._move("overhead", share)
            return
        if start < cost.known:
            wasted = share * min(cost.known - start, count) // count
            self._move("preemption" if request.num_preemptions else "replay", wasted)
            cost.wasted_ns += wasted
            share -= wasted
        cost.known = max(cost.known, min(start + count, len(request.tokens)))
        cost.compute_ns += share
        if cost.reported:
            self._reporting.add(request)
        if request.asked_by:
            self._sum_kv(request)  # the other engine is told what its prompt has cost

    def _decode(self, requests: list[Request], share: int, new: set[Request]) -> None:
        """Charge requests with one token each, in equal parts. new: those of them that have just joined."""
        each, self._carried_ns = divmod(share + self._carried_ns, len(requests))
        self._per_decode_ns += each
        for request in new:
            if request.asked_by:  # the rest of its prompt was one token
                self._leave(request)
                self._sum_kv(request)
                self._decodes = None

    def _join(self, requests: list[Request]) -> set[Request]:
        """Make these the requests that decode in a step. Returns those that did not in the step before."""
        if requests == self._decodes:
            return set()
        self._decodes, rows = requests, set(requests)
        for request in self._joined.keys() - rows:
            self._leave(request)
        new = rows - self._joined.keys()
        self._joined.update(dict.fromkeys(new, self._per_decode_ns))
        self._reporting |= {request for request in new if cost_of(request).reported}
        return new

    def _leave(self, request: Request) -> None:
        """Charge a request with its decodes."""
        paid, cost = self._per_decode_ns - self._joined.pop(request, self._per_decode_ns), cost_of(request)
        if cost.closed:
            self._move("overhead", paid)
        else:
            cost.compute_ns += paid
            cost.known = max(cost.known, len(request.tokens) - 1)

    def _move(self, line: CostLine, wasted_ns: int) -> None:
        self.ns["requests"] -= wasted_ns
        self.ns[line] += wasted_ns

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless all time since the start is in one line, and all time of steps is paid for.
        requests: all that there have been."""
        assert sum(self.ns.values()) == self.wall_ns, f"{self.ns} is not {self.wall_ns}"
        assert min(self.ns.values()) >= 0, "a line is negative"
        unpaid = sum(
            self._per_decode_ns - joined for request, joined in self._joined.items() if cost_of(request).closed
        )
        paid = sum(map(self.of, requests))
        assert paid + unpaid + self._carried_ns == self.ns["requests"], "a step is not paid for"
