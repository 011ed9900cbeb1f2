"""One engine on the simulated clock: the real scheduler and block pool, and step times from a cost model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from cluster.lab.simulator.billing.meter import EngineMeter, NoMeter
from cluster.lab.simulator.cost_model import Work
from cluster.lab.simulator.fast_forward import FastForward, token_of
from cluster.lab.simulator.results import LatencyHistogram
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import VOCABULARY
from deployments.billing.prices import FREE
from deployments.routing.config import Role
from engine.core.block_pool import BlockPool
from engine.core.door.inputs import Added, TimePassed
from engine.core.door.kernel import ModelLimits
from engine.core.engine_stats import load_of
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.output import Event
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.costs.step_cost import StepTimes, StepWork
from engine.parts.costs.cost_accounts import CostAccounts
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import AddedRemote, HandoffWentOn, MovesAsked
from engine.parts.kv_tiers.inputs import TiersAnswered
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.serving.kv_events import KVEventPublisher
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import HandoffAction, HandoffEvent
from engine.wire.messages import EngineUpdate, Subscribe
from engine.wire.parts.handoffs import PrefillReplica
from engine.wire.parts.kv_offload import StoreListing, TierAnswer, TierCommand
from engine.wire.plan import StepPlan, StepResult
from engine.wire.remote_request import RemoteRequest

MAX_FAST_FORWARD_STEPS = 64  # limited, because the next arrival may cut it short and waste the rest


class Replica:
    """A simulated engine. Its step loop (engine/core/engine.py) runs without overlap: requests that arrive during a
    step are planned in the next step."""

    def __init__(
        self,
        name: str,
        role: Role,
        spec: ClusterSpec,
        handoffs: Handoffs,
        times: StepTimes | None,
        at_once: int,
        now: float = 0.0,
        make_tier: Callable[[KVCacheManager, StepTimes], KVOffloading] | None = None,
    ):
        """times: step times that the engine learns itself, or None. at_once: maximum steps of a fast-forward; 0
        simulates every step separately. now: when the engine starts. make_tier: returns what decides about a tier below
        the KV cache; None without one."""
        config = spec.engine_of(role)
        self.name, self.role, self.times, self.cost = name, role, times, spec.cost
        self._layers = spec.layers
        self.due: float | None = None  # time of its next wake, when its steps have ended; None if it has nothing to do
        self.ended: list[Request] = []  # ended requests, oldest first; the caller empties it
        self.moved: list[Event] = []  # the last events of requests that another replica continues; likewise
        self.itl = LatencyHistogram()
        self.busy_s = 0.0  # seconds in steps
        pool = BlockPool(spec.num_blocks, config.known_block_size, config.enable_prefix_caching)
        layers = spec.kv_layers
        one_group = KVCacheManager([SingleTypeKVCacheManager(pool)])
        kv_cache, limits = (one_group, []) if layers is None else layers.manager(config)
        self.scheduler = Scheduler(
            config,
            kv_cache,
            limits=ModelLimits(spec.max_model_len, VOCABULARY),
            parts=[
                CostAccounts(),
                *([] if make_tier is None else [make_tier(kv_cache, times or StepTimes())]),
                *limits,
                handoffs,
            ],
        )
        self.meter: NoMeter | EngineMeter = NoMeter()
        if spec.prices != FREE:
            assert times is not None
            self.meter = EngineMeter(times, kv_cache, spec.group_bytes, now)
        self._kv_events = KVEventPublisher(name, self.scheduler)
        self._fast_forward, self._max_steps = FastForward(self.scheduler), at_once
        self._inbox: list[HandoffEvent] = []
        self.tier_commands: list[TierCommand] = []  # copies that are due, oldest first; the caller empties it
        self.actions: list[HandoffAction] = []  # of handoffs, likewise
        self._tier_answers: list[TierAnswer | StoreListing] = []
        self._plan: StepPlan | None = None  # the running step, if it is a single one
        self._ends: list[float] = []  # or the ends of the fast-forward's steps that are not recorded yet
        self._began = 0.0
        self._settled = False  # whether no waiting request can start until something other than decoding happens

    def add(self, message: GenerateRequest, now: float) -> None:
        """Add a request. Raises ServingError."""
        self.scheduler.apply(Added(message), now)
        self._kv_events.admitted(message.request_id)
        self._came(now)

    def add_remote_prefill(self, remote_request: RemoteRequest, now: float) -> None:
        """Add another engine's prompt. Raises ServingError."""
        self.scheduler.apply(AddedRemote(remote_request), now)
        self._kv_events.admitted(remote_request.handoff_id)
        self._came(now)

    def handle(self, event: HandoffEvent, now: float) -> None:
        """Queue the progress of a handoff, to be handled between two steps."""
        self._inbox.append(event)
        self._came(now)

    def move(self, count: int, now: float) -> None:
        """Let up to `count` requests leave for other replicas: at once if they wait, else after their next token."""
        self.catch_up(now)
        self.scheduler.apply(MovesAsked(count), now)
        self._tell()
        self._came(now)

    def tier_answered(self, answers: list[TierAnswer | StoreListing], now: float) -> None:
        """Queue the end of a copy, or changes of the store, to be recorded between two steps."""
        self._tier_answers += answers
        self._came(now)

    def wake(self, now: float) -> None:
        """Record the steps that have ended, and begin the next. Call it at `due`."""
        assert now == self.due
        if self._ends:
            self._record(len(self._ends))
        elif self._plan is not None:
            self._commit(self._plan, now)
        self._begin(now)

    def catch_up(self, now: float) -> None:
        """Record the steps of a fast-forward that have ended by now, so that the scheduler's state is current."""
        if 0 < (steps := bisect_right(self._ends, now)) < len(self._ends):
            self._record(steps)

    def subscribe(self, now: float, *, resync: bool = False) -> None:
        """Collect updates for the router. Call it again within SUBSCRIPTION_S. resync: whether the router is a new one
        that knows nothing of this replica yet."""
        self._kv_events.subscribe(Subscribe("router", resync), now)

    def updates(self, now: float) -> list[EngineUpdate]:
        """Return the updates for the router that are due."""
        return [update for update, _ in self._kv_events.messages(now)]

    def prefill_state(self, now: float) -> PrefillReplica:
        """Return the figures from which decode engines decide where to compute a prompt."""
        assert self.times is not None
        self.catch_up(now)
        per_step, per_token = self.times.by_tokens.coefficients
        queued = load_of(self.scheduler).queued_tokens
        return PrefillReplica(
            engine_id=self.name, queued_tokens=queued, seconds_per_step=per_step, seconds_per_token=per_token
        )

    def _came(self, now: float) -> None:
        self._settled = False
        if self._ends:
            del self._ends[bisect_right(self._ends, now) + 1 :]
            self.due = self._ends[-1]
        elif self.due is None:
            self._begin(now)

    def _begin(self, now: float) -> None:
        scheduler, self._began, self._plan = self.scheduler, now, None
        self.meter.resume(now)
        for event in self._inbox:
            scheduler.apply(HandoffWentOn(event), now)
        self._inbox.clear()
        if self._tier_answers:
            scheduler.apply(TiersAnswered([*self._tier_answers]), now)
            self._tier_answers.clear()
        quiet = self._settled or not scheduler.queue.waiting
        quiet = quiet and not any(request.leaving for request in scheduler.queue.running)
        if self._max_steps and quiet and (steps := self._fast_forward.max_steps(self._max_steps, now)):
            scheduler.apply(TimePassed(), now)
            self._tell()
            self._ends = self._step_ends(steps, now)
            self.due = self._ends[-1]
            return
        preemptions = scheduler.totals.preemptions
        self._plan = plan = scheduler.schedule(now)
        self._tell()
        if plan is None:
            self.due = None
            self.meter.rest("stalled" if scheduler.has_work else "idle")
            return
        self._settled = not plan.added and max(plan.counts) == 1 and scheduler.totals.preemptions == preemptions
        self.due = now + self.cost.seconds(*Work.of(plan, self._layers))

    def _step_ends(self, steps: int, now: float) -> list[float]:
        running = len(self.scheduler.queue.running)
        lengths = [len(request.tokens) for request in self.scheduler.queue.running]
        seconds, ends, context, alike = self.cost.seconds, [], sum(lengths), self._layers.alike
        for step in range(steps):
            if alike:
                now += seconds(running, running, context, context)
                context += running
            else:
                now += seconds(running, running, *self._seen(lengths, step))
            ends.append(now)
        return ends

    def _seen(self, lengths: list[int], steps: int) -> tuple[float, float]:
        """Return `pairs` and `context` of a decode step. lengths: lengths of its sequences `steps` steps earlier."""
        pairs = context = 0.0
        for length in lengths:
            own_pairs, own_context = self._layers.seen(length + steps - 1, 1)
            pairs += own_pairs
            context += own_context
        return pairs, context

    def _record(self, steps: int) -> None:
        """Record the first steps of the fast-forward."""
        ends, self._ends = self._ends[:steps], self._ends[steps:]
        running = len(self.scheduler.queue.running)
        self.itl.add_steps([self._began, *ends], running)
        if self.times is not None:
            self.times.observe_decodes(running, (ends[-1] - self._began) / steps, steps)
        self.busy_s += ends[-1] - self._began
        self.meter.decodes(self.scheduler.queue.running, self._began, ends[-1])
        self._began = ends[-1]
        self._fast_forward.advance(ends)
        if self.scheduler.out.events:
            self._settled = False
            self._tell()

    def _commit(self, plan: StepPlan, now: float) -> None:
        _, requests = self.scheduler.planned[0]
        tokens: list[list[int]] = []
        for request, asked in zip(requests, plan.samples, strict=True):
            tokens.append([token_of(request)] if asked else [])
            if asked and request.clock.last_token_at is not None:
                self.itl.add(now - request.clock.last_token_at)
        if self.times is not None:
            self.times.observe_step(StepWork.of(plan), now - self._began)
        self.busy_s += now - self._began
        self.meter.step(plan, requests, self._began, now)
        ended, nothing = len(self.ended), [None] * len(tokens)
        self.scheduler.commit(
            StepResult(step=plan.step, tokens=tokens, logprobs=[*nothing], prompt_logprobs=[*nothing]),
            now,
            now - self._began,
        )
        self._tell()
        self._settled = self._settled and len(self.ended) == ended

    def _tell(self) -> None:
        """Pass on what the scheduler has to say."""
        self.actions += self.scheduler.take_messages("engines")
        self.tier_commands += self.scheduler.take_messages("tiers")
        self.scheduler.take_messages("control")  # each comes with an action
        events = self.scheduler.out.take_events()
        self.meter.report(events)
        for event in events:
            self._kv_events.prefilled(event)
            if event.delta.finish_reason is not None:
                self._kv_events.finished(event.request.request_id)
                if event.delta.error is not None and event.delta.error.code == "moved":
                    self.moved.append(event)
                elif event.request.asked_by is None:
                    self.ended.append(event.request)
