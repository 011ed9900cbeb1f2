"""What a tape says about the hour that it covers: its requests, the cost of its steps, and how long requests took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.simulator.cost_model import Work
from cluster.simulator.recorded.cost_fit import Fit, fit_cost
from cluster.simulator.spec import NO_LIMIT, ClusterSpec
from cluster.simulator.trace import OUTPUT_ID, Trace
from engine.core.request import Request
from engine.core.tape.inputs import Added
from engine.core.tape.replay import Replay
from engine.core.tape.ring import EngineTape
from engine.errors import InvalidParameter
from engine.wire.plan import StepPlan
from engine.wire.sampling_params import seed_of

MIN_STEPS = 30  # to which a cost can be fitted
WARM_UP_STEPS = 4  # of an engine's first steps, which compile kernels


@dataclass(slots=True)
class RecordedRequest:
    arrived_at: float  #: seconds since 1970
    num_prompt: int
    engine: int  #: number of its tape
    request: Request | None = None
    hashes: list[bytes] = field(default_factory=list)  #: of its first blocks, as many as the engine needed
    ended: bool = False  #: whether it ended by itself; if not, it was aborted, or the tape ends before it

    @property
    def ttft_s(self) -> float | None:
        assert self.request is not None
        first = self.request.clock.first_token_at
        return None if first is None else first - self.request.clock.arrived_at

    @property
    def tpot_s(self) -> float | None:
        assert self.request is not None
        clock, tokens = self.request.clock, self.request.num_output
        if clock.first_token_at is None or clock.last_token_at is None or tokens < 2:
            return None
        return (clock.last_token_at - clock.first_token_at) / (tokens - 1)


class Recording:
    """The requests and the steps of some tapes of one cluster."""

    def __init__(self, tapes: Sequence[EngineTape]):
        """Raises Diverged if a tape does not replay, and InvalidParameter if it says too little."""
        self.requests: list[RecordedRequest] = []
        self.decode = self.prefill = 0  # engines
        self._works: list[Work] = []
        self._seconds: list[float] = []
        for number, tape in enumerate(tapes):
            self._read(number, tape)
        self.requests = sorted((r for r in self.requests if r.request is not None), key=lambda r: r.arrived_at)
        if not self.requests or self.decode == 0:
            raise InvalidParameter("tape", "", "one with requests that have ended")
        started = sum(request.request.num_output > 0 for request in self.requests if request.request)
        if not started or len(self._works) < MIN_STEPS:
            raise InvalidParameter(
                "tape", f"{len(self._works)} steps", f"one of at least {MIN_STEPS} steps with answers"
            )

    def _read(self, number: int, tape: EngineTape) -> None:
        replay = Replay(tape)
        began, idle = 0.0, True  # when the step began that ends next; whether it was the first after a pause
        remote = tape.role == "prefill"
        of_order: dict[int, RecordedRequest] = {}
        own: list[tuple[RecordedRequest, Request]] = []

        def on_step(plan: StepPlan, _: float) -> None:
            # requests also wait for the host between two steps, which the recorded seconds do not contain
            seconds = replay.moments[replay.position].at - began
            if plan.step > WARM_UP_STEPS and seconds > 0:
                self._works.append(Work.of(plan))
                self._seconds.append(seconds)

        def on_end(request: Request, reason: str) -> None:
            recorded = of_order.pop(request.order[1], None)
            if recorded is not None:
                recorded.request, recorded.hashes = request, list(request.prefix.hashes)
                recorded.ended = reason in ("stop", "length")

        replay.on_step, replay.on_end = on_step, on_end
        for moment in replay.run():
            if isinstance(moment.input, Added):
                live = replay.scheduler.queue.live[moment.input.message.request_id]
                new = RecordedRequest(tape.wall_s + moment.at, live.num_prompt, number)
                of_order[live.order[1]] = new
                own.append((new, live))
            if moment.commits:
                began, idle = moment.at, not replay.scheduler.has_work
            elif moment.digest is not None and (idle or not moment.digest):
                began, idle = moment.at, not moment.digest
        for new, live in own:
            if new.request is None:  # it still ran at the end of the tape
                new.request, new.hashes = live, list(live.prefix.hashes)
        self.requests += [new for new, live in own if live.num_output > 0]
        self.prefill += remote
        self.decode += not remote
        if not remote or not hasattr(self, "scheduler"):
            self.scheduler = replay.scheduler

    @property
    def fit(self) -> Fit:
        """The cost of the steps."""
        return fit_cost(self._works, self._seconds)

    def trace(self) -> Trace:
        """Return the requests as a trace: an id for each block, the same for the same prompt. Blocks of answers are the
        tokens that the simulated engines answer, so that a prompt that repeats an answer finds it in the cache."""
        size, start = self.block_size, self.requests[0].arrived_at
        ids: dict[bytes, int] = {}
        texts: dict[int, list[int]] = {}
        hash_ids = []
        for index, recorded in enumerate(self.requests):
            assert recorded.request is not None
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
            np.array([r.request.num_output for r in self.requests if r.request is not None], dtype=np.int64),
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
        """Return the cluster as it was. Its router is not on the tape: it is the default."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache.pool
        if len(scheduler.kv_cache.pools) > 1:
            raise InvalidParameter("tape", "KV cache groups", "one of a model whose layers all keep all tokens")
        return ClusterSpec(
            replicas=self.decode,
            prefill_replicas=self.prefill,
            engine=replace(scheduler.config, block_size=pool.block_size, max_waiting=NO_LIMIT),
            cost=self.fit.cost,
            num_blocks=pool.num_blocks,
            max_model_len=scheduler.limits.max_model_len,
            kv_bytes=pool.block_bytes / pool.block_size,
            call_s=0.0,
            token_s=0.0,
            handoff="auto",
        )
