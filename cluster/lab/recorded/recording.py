"""What a tape says about the hour that it covers: its requests, the cost of its steps, and how long requests took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from cluster.config.simulation_options import HandoffPolicy, RouterName
from cluster.lab.recorded.cost_fit import MIN_STEPS, Fit, fit_shared
from cluster.lab.recorded.metered_replay import MeteredReplay
from cluster.lab.simulator.billing.costs import Costs
from cluster.lab.simulator.billing.meter import EngineMeter
from cluster.lab.simulator.cost_model import Work
from cluster.lab.simulator.spec import NO_LIMIT, ClusterSpec
from cluster.lab.simulator.trace import OUTPUT_ID, Trace
from cluster.lab.tape.replay_limits import replay_limits
from cluster.lab.tape.tapes import bytes_of, read_routers, replayed
from deployments.billing.prices import Prices
from deployments.routing.config import RoutingConfig
from engine.config import EngineConfig
from engine.core.request import Request
from engine.errors import InvalidParameter
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.file import read_all
from engine.parts.tape.inputs import AddedShape
from engine.wire.plan import StepPlan
from engine.wire.sampling_params import seed_of

DEFAULT_ROUTER: RouterName = RoutingConfig().policy
TAKEN_S = 0.0005  # after a step, within which an engine takes what came during it
HANDOFF_S = 0.006  # call and messages of a handoff (docs/measurements/simulator.md)
WARM_UP_STEPS = 4  # of an engine's first steps, which compile kernels


@dataclass(slots=True)
class RecordedRequest:
    request: Request
    arrived_at: float  #: seconds since 1970
    waited_s: float  #: before the engine took it, which it does between two steps
    engine: int  #: number of its tape
    hashes: list[bytes] = field(default_factory=list)  #: of its first blocks, as many as the engine needed
    ended: bool = False  #: whether it ended by itself; if not, it was aborted, or the tape ends before it

    @property
    def num_prompt(self) -> int:
        return self.request.num_prompt

    @property
    def num_output(self) -> int:
        return self.request.num_output

    @property
    def num_cached(self) -> int:
        return self.request.prefix.num_cached

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        clock = self.request.clock
        assert clock.first_token_at is not None
        return clock.first_token_at - clock.arrived_at + self.waited_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; nan if there is only one."""
        clock, tokens = self.request.clock, self.num_output
        assert clock.first_token_at is not None and clock.last_token_at is not None
        return (clock.last_token_at - clock.first_token_at) / (tokens - 1) if tokens > 1 else float("nan")

    @property
    def ended_at(self) -> float:
        """Time of its last token, in seconds since 1970."""
        clock = self.request.clock
        assert clock.last_token_at is not None
        return self.arrived_at + self.waited_s + clock.last_token_at - clock.arrived_at


class Recording:
    """The requests and the steps of some tapes of one cluster, merged by time."""

    def __init__(
        self,
        tapes: Sequence[EngineTape],
        router: RouterName = DEFAULT_ROUTER,
        *,
        since: float = 0.0,
        until: float = float("inf"),
    ):
        """router: policy of the router. since, until: seconds since 1970 between which requests arrived. Raises
        Diverged if a tape does not replay, and InvalidParameter if it says too little."""
        self.router = router
        self.requests: list[RecordedRequest] = []
        self.decode = self.prefill = 0  # engines
        self.policy: HandoffPolicy = "auto"
        self._since, self._until = since, until
        self._meters: list[EngineMeter] = []
        self._works: list[Work] = []
        self._steps: list[tuple[int, float, float]] = []  # engine, start and end of each of them, in seconds since 1970
        for number, tape in enumerate(tapes):
            self._read(number, tape)
        self.requests.sort(key=lambda recorded: recorded.arrived_at)
        if not self.requests or self.decode == 0:
            raise InvalidParameter("tape", "", "one with requests that have ended")
        if len(self._works) < MIN_STEPS:
            raise InvalidParameter(
                "tape", f"{len(self._works)} steps", f"one of at least {MIN_STEPS} steps with answers"
            )

    @classmethod
    def of_files(cls, files: Sequence[Path]) -> Recording:
        """Return the recording in some files. Raises InvalidParameter, also if this version makes other decisions."""
        policies = {tape.policy for tape in read_routers(files) if tape.role == "decode"}
        tapes = read_all(files)
        with replayed(tapes, files), replay_limits(bytes_of(tapes)):
            return cls(tapes, policies.pop() if len(policies) == 1 else DEFAULT_ROUTER)

    def _read(self, number: int, tape: EngineTape) -> None:
        segments = tape.segments
        while len(segments) > 1 and tape.wall_s + segments[1].started_at <= self._since:
            segments = segments[1:]
        replay = MeteredReplay(msgspec.structs.replace(tape, segments=segments))
        began, idle = 0.0, True  # when the step began that ends next; whether it was the first after a pause
        ended, step_s = 0.0, 0.0  # the newest step's end and time
        remote = tape.role == "prefill"
        of_order: dict[int, RecordedRequest] = {}
        own: list[RecordedRequest] = []

        def on_step(plan: StepPlan, _: float) -> None:
            # requests also wait for the host between two steps, which the recorded seconds do not contain
            end = replay.moments[replay.position].at
            if plan.step > WARM_UP_STEPS and end > began and self._covers(tape.wall_s + began):
                self._works.append(Work.of(plan))
                self._steps.append((number, tape.wall_s + began, tape.wall_s + end))

        def on_end(request: Request, reason: str) -> None:
            recorded = of_order.pop(request.order[1], None)
            if recorded is not None:
                recorded.hashes, recorded.ended = list(request.prefix.hashes), reason in ("stop", "length")

        replay.on_step, replay.on_end = on_step, on_end
        for moment in replay.run():
            if tape.wall_s + moment.at > self._until and not of_order:
                break
            if isinstance(moment.input, AddedShape):
                live = replay.scheduler.queue.live[moment.input.message.request_id]
                # it may have come at any time during the step before, and is taken to have come in the middle
                waited_s = step_s / 2 if not idle or moment.at - ended < TAKEN_S else 0.0
                new = RecordedRequest(live, tape.wall_s + moment.at - waited_s, waited_s, number)
                of_order[live.order[1]] = new
                own.append(new)
            if moment.commits:
                ended, step_s = moment.at, moment.at - began
                began, idle = moment.at, not replay.scheduler.has_work
            elif moment.digest is not None and (idle or not moment.digest):
                began, idle = moment.at, not moment.digest
        for still_running in of_order.values():
            still_running.hashes = list(still_running.request.prefix.hashes)
        answered = (each for each in own if each.request.clock.last_token_at is not None)
        self.requests += [each for each in answered if self._covers(each.arrived_at)]
        self._meters.append(replay.meter)
        self.prefill += remote
        self.decode += not remote
        if not remote or not hasattr(self, "scheduler"):
            self.scheduler = replay.scheduler
        handoffs = replay.scheduler.parts.get(Handoffs)
        policy = None if handoffs is None else handoffs.remote.policy
        if policy is not None and policy.config.policy == "always":
            self.policy = "always"

    def _covers(self, at: float) -> bool:
        return self._since <= at <= self._until

    @cached_property
    def fit(self) -> Fit:
        engines, starts, ends = (np.array(column) for column in zip(*self._steps, strict=True))
        others = np.zeros(len(starts), dtype=np.int64)  # engines that compute as a step begins
        for engine in range(self.decode + self.prefill):
            own = engines == engine
            if own.any():
                place = np.searchsorted(starts[own], starts, "right") - 1
                others += (place >= 0) & (starts < ends[own][place]) & ~own
        return fit_shared(self._works, (ends - starts).tolist(), others)

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last token."""
        return max(request.ended_at for request in self.requests) - self.requests[0].arrived_at

    @property
    def output_tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    def costs(self, prices: Prices) -> Costs:
        """Return what the engines have cost from the first arrival to the last token."""
        return Costs.of(
            prices,
            self._meters,
            engine_s=self.seconds * (self.decode + self.prefill),
            seconds=self.seconds,
            requests=len(self.requests),
            prompt_tokens=sum(request.num_prompt for request in self.requests),
            output_tokens=self.output_tokens,
        )

    @property
    def busy(self) -> float:
        """Fraction of the engines' time in which they computed."""
        seconds = max(end for *_, end in self._steps) - min(start for _, start, _ in self._steps)
        return sum(end - start for _, start, end in self._steps) / seconds / (self.decode + self.prefill)

    def trace(self) -> Trace:
        """Return the requests as a trace: an id for each block, the same for the same prompt. Blocks of answers are the
        tokens that the simulated engines answer, so that a prompt that repeats an answer finds it in the cache."""
        size, start = self.block_size, self.requests[0].arrived_at
        ids: dict[bytes, int] = {}
        texts: dict[int, list[int]] = {}
        hash_ids = []
        for index, recorded in enumerate(self.requests):
            whole = recorded.num_prompt // size
            own = [ids.setdefault(each, len(ids) + 1) for each in recorded.hashes]
            prompt = own[:whole]
            while len(prompt) < -(-recorded.num_prompt // size):
                prompt.append(ids.setdefault(b"%d %d" % (index, len(prompt)), len(ids) + 1))
            hash_ids.append(prompt)
            self._add_answer(texts, index, recorded, own, prompt)
        if len(ids) >= OUTPUT_ID:
            raise InvalidParameter("tape", f"{len(ids)} blocks", f"one of fewer than {OUTPUT_ID}")
        return Trace(
            "tape",
            np.array([recorded.arrived_at - start for recorded in self.requests]),
            np.array([recorded.num_prompt for recorded in self.requests], dtype=np.int64),
            np.array([recorded.num_output for recorded in self.requests], dtype=np.int64),
            hash_ids,
            size,
            texts,
        )

    def _add_answer(
        self, texts: dict[int, list[int]], index: int, recorded: RecordedRequest, own: list[int], prompt: list[int]
    ) -> None:
        size, whole = self.block_size, recorded.num_prompt // self.block_size
        token = OUTPUT_ID + seed_of(str(index)) % (OUTPUT_ID - 1)
        rest = recorded.num_prompt - whole * size
        for place, block in enumerate(own[whole:]):
            if block not in texts:
                texts[block] = [prompt[-1]] * rest + [token] * (size - rest) if not place and rest else [token] * size

    @property
    def block_size(self) -> int:
        size: int = self.scheduler.kv_cache.pool.block_size
        return size

    def spec(self) -> ClusterSpec:
        """Return the cluster as it was. The time of handoffs is not known if there were none."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache.pool
        if len(scheduler.kv_cache.pools) > 1:
            raise InvalidParameter("tape", "KV cache groups", "one of a model whose layers all keep all tokens")
        return ClusterSpec(
            replicas=self.decode,
            prefill_replicas=self.prefill,
            engine=replace(scheduler.config.of(EngineConfig), block_size=pool.block_size, max_waiting=NO_LIMIT),
            cost=self.fit.cost,
            contention=self.fit.contention,
            num_blocks=pool.num_blocks,
            max_model_len=scheduler.limits.max_model_len,
            router=self.router,
            kv_bytes=pool.block_bytes / pool.block_size,
            call_s=0.0,
            token_s=0.0,
            handoff_s=HANDOFF_S,
            handoff=self.policy,
        )
