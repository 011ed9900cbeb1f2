"""The step loop of one engine: plan, compute, record."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Literal

import msgspec

from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.handoffs import HandoffManager
from engine.core.remote_prefill_policy import RemotePrefillPolicy
from engine.core.request import Request, State
from engine.core.scheduler import Event, Scheduler
from engine.core.step_cost import StepTimes, StepWork
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError, EngineUnavailable, RequestTimeout, ServingError
from engine.kv_transfer.fingerprint import fingerprint
from engine.kv_transfer.protocol.actions import AcceptPrefill, RefusePrefill
from engine.model.config import ModelConfig
from engine.model.folder import resolve
from engine.runner.model_runner import Launched, ModelRunner
from engine.text.grammar import COMPILE_TIMEOUT_S, Compilation, GrammarCompiler
from engine.wire.messages import CancelDispatch, DispatchPrefill, EngineStats, GenerateRequest
from engine.wire.plan import StepPlan, StepResult
from engine.wire.remote_prefill import RemotePrefillRequest

if TYPE_CHECKING:  # both need pyzmq, which an engine of one rank without handoffs does without
    from engine.distributed.plan_broadcast import PlanBroadcaster
    from engine.kv_transfer.channel import HandoffChannel

logger = logging.getLogger(__name__)

GRAMMAR_POLL_S = 0.005  # between looks whether something can be computed now
POLL_INTERVAL_S = 1.0  # how often a step that takes long is asked whether all ranks are there


class EngineCore:
    """Scheduler and runner of one engine, without any socket.

    With `overlap` step n+1 is planned and prepared while step n computes: on a CPU in a thread of its own, on a GPU
    beside the host in any case, and there step n+1 also lies ready in the GPU's queue before step n has ended. Without,
    everything happens in turn. Both give the same tokens.

    idle: the last step found nothing to compute, and nor will the next before something has come from outside: a
    command, or what `wake` tells of.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: TPGroup | None = None,
        *,
        engine_id: str = "engine",
        host: str = "127.0.0.1",
        wake: Callable[[], None] = lambda: None,
    ):
        """group: of `config.tensor_parallel` ranks, joined; this is its rank 0. Raises StartupError.

        For handoffs: engine_id names this engine to others, which reach it at `host`; wake is called, from another
        thread, when a step has something to do again after `idle`.
        """
        self.config = config
        self._group = group or TPGroup.single()
        if self._group.size != config.tensor_parallel:
            raise ConfigError("tensor_parallel", config.tensor_parallel, f"the size of the group ({self._group.size})")
        with self._group.starting():
            folder = resolve(config.model, weights=config.load_format == "auto")
            self.model_config = ModelConfig.from_folder(folder, config.quantization)
            self.runner = ModelRunner(config, self.model_config, folder, self._group)
            if config.handoff is not None:
                from engine.kv_transfer.transport.ranks import start_kv_worker

                self._kv_worker, kv_workers = start_kv_worker(
                    config.handoff, self.runner.kv_cache, self.model_config.num_kv_heads, self._group, host
                )
            self._plan_broadcaster: PlanBroadcaster | None = None
            if self._group.size > 1:
                from engine.distributed.plan_broadcast import PlanBroadcaster

                self._plan_broadcaster = PlanBroadcaster(self._group)
        self.step_times = StepTimes()
        self.handoff_channel: HandoffChannel | None = None
        self.fingerprint = ""
        handoffs = None
        if config.handoff is not None:
            from engine.kv_transfer.channel import HandoffChannel

            self.fingerprint = fingerprint(
                self.model_config, folder, self.runner.dtype, self.runner.kv_dtype, self.runner.block_size
            )
            self.handoff_channel = HandoffChannel(
                config.handoff,
                engine_id=engine_id,
                host=host,
                workers=kv_workers,
                block_size=self.runner.block_size,
                wake=wake,
            )
            policy = None
            if config.handoff.role == "decode":
                quarantined = self.handoff_channel.quarantined
                policy = RemotePrefillPolicy(config.handoff, self.step_times.by_tokens, quarantined)
            handoffs = HandoffManager(policy, self.handoff_channel.peer, self.fingerprint)
        self.max_model_len = self.runner.max_model_len
        self.scheduler = Scheduler(
            config,
            BlockPool(self.runner.num_blocks, self.runner.block_size, config.enable_prefix_caching),
            max_model_len=self.max_model_len,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=frozenset(self.model_config.eos_token_ids),
            handoffs=handoffs,
        )
        self._grammars = GrammarCompiler(folder, self.model_config.vocab_size, self.scheduler.eos_token_ids)
        self._compiling: dict[Request, Compilation] = {}
        self._grammar_compiled = threading.Event()  # rung when a grammar is compiled
        self._in_flight: deque[Future[Launched]] = deque()
        self._submitted: deque[tuple[float, StepWork]] = deque()  # of each of them: when, and what it computes
        # with other ranks also without overlap, so that one that hangs can be noticed while a step waits for it; what
        # returns before it has computed needs no thread
        threaded = self._plan_broadcaster is not None or (self.runner.overlap and not self.runner.on.asynchronous)
        self._executor = ThreadPoolExecutor(1, "model", self.runner.on.bind) if threaded else None
        self._deadlines: list[tuple[float, int, Request]] = []  # heap of (when, number of arrival, request)
        self.last_step_at = time.monotonic()
        self.idle = True
        self._broken: str | None = None
        self._notices: list[DispatchPrefill | CancelDispatch] = []

    def add(self, message: GenerateRequest) -> None:
        """Take a request, or raise a ServingError."""
        now = time.monotonic()
        self._took(self.scheduler.add(message, now), now)

    def prefill(self, prefill_request: RemotePrefillRequest) -> bool:
        """Compute a prompt for another engine. False if it is refused, which that engine is told."""
        assert self.handoff_channel is not None
        if prefill_request.handoff_id in self.scheduler.queue.live:
            return True  # the prefill request came twice
        now = time.monotonic()
        try:
            self.scheduler.handoffs.check(prefill_request)
            request = self.scheduler.add_remote_prefill(prefill_request, now)
        except ServingError as error:
            logger.warning("refused a prefill request handoff_id=%s reason=%s", prefill_request.handoff_id, error)
            self.handoff_channel.submit(RefusePrefill(prefill_request, str(error)))
            return False
        self.handoff_channel.submit(AcceptPrefill(prefill_request))
        self._took(request, now)
        return True

    def check(self, message: GenerateRequest) -> None:
        """Raise RequestError if `add` would refuse this request whatever the load, or end it for its grammar."""
        self.scheduler.check_request(message)
        if message.params.structured_outputs is not None:
            compilation = self._grammars.start(message.params.structured_outputs, [], time.monotonic())
            wait([compilation.prototype], COMPILE_TIMEOUT_S)
            self._grammars.finish(compilation)

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> Event | None:
        """End a request, if it is live; with `stop` its text has reached a stop string."""
        return self.scheduler.abort(request_id, time.monotonic(), reason=reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Event]:
        """Plan a step, and finish the one before it (with overlap) or this one (without).

        A step that raises leaves the engine without use: what its requests have computed is not known.
        """
        if self._broken is not None:
            raise EngineUnavailable(f"an earlier step failed: {self._broken}")
        try:
            return self._step()
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _step(self) -> list[Event]:
        if self._plan_broadcaster:
            self._plan_broadcaster.check()
        self.idle = False
        events = self._expire() + self._take_compiled() + self._take_handoffs()
        plan = self.scheduler.schedule(time.monotonic())
        # A block that has just been reserved for KV from elsewhere may have belonged to a sequence that the step under
        # way still writes for, past its end. That step ends before anybody hears of the reservation.
        if not self._in_flight:
            self._submit_handoffs()
        if plan is not None:
            self._submit(plan)
            if self.runner.overlap and len(self._in_flight) == 1:
                return events  # there may be more to plan while it computes
        if self._in_flight:
            result = self._collect(self._in_flight.popleft())
            self._measure()
            events += self.scheduler.commit(result, self.last_step_at)
            self._submit_handoffs()
            if self._plan_broadcaster:
                self._plan_broadcaster.committed(result)
        elif not events:
            self._idle()
        return events

    def _idle(self) -> None:
        """All that is left waits for its grammar, or for what that allows next, or for another engine."""
        if self._compiling or any(r.grammar for r in [*self.scheduler.queue.running, *self.scheduler.queue.waiting]):
            self._grammar_compiled.wait(GRAMMAR_POLL_S)
            self._grammar_compiled.clear()
        else:
            self.idle = True
        self.last_step_at = time.monotonic()  # no step is late

    def _measure(self) -> None:
        """A step has ended. It began when it was submitted, or when the one before it ended."""
        submitted_at, work = self._submitted.popleft()
        began_at, self.last_step_at = max(submitted_at, self.last_step_at), time.monotonic()
        self.step_times.observe_step(work, self.last_step_at - began_at)

    # -- handoffs ------------------------------------------------------------------------------------------

    def _take_handoffs(self) -> list[Event]:
        if self.handoff_channel is None:
            return []
        now = time.monotonic()
        return [event for handoff in self.handoff_channel.events() for event in self.scheduler.handle(handoff, now)]

    def _submit_handoffs(self) -> None:
        """Pass on what the scheduler asks of the channel, and of the control actor."""
        if self.handoff_channel is None:
            return
        actions = self.scheduler.handoffs.actions
        for action in actions:
            if isinstance(action, DispatchPrefill | CancelDispatch):
                self._notices.append(action)
            else:
                self.handoff_channel.submit(action)
        actions.clear()

    def take_notices(self) -> list[DispatchPrefill | CancelDispatch]:
        """Return the messages for the control actor since the last call."""
        notices, self._notices = self._notices, []
        return notices

    # -- grammars ------------------------------------------------------------------------------------------

    def _compile(self, request: Request, now: float) -> None:
        """If it needs a grammar: it waits for that in the scheduler, and for nothing if the grammar is known."""
        if request.params.structured_outputs is not None:
            output = request.tokens[request.num_prompt :]
            compilation = self._grammars.start(request.params.structured_outputs, output, now)
            compilation.prototype.add_done_callback(lambda _: self._grammar_compiled.set())
            self._compiling[request] = compilation

    def _take_compiled(self) -> list[Event]:
        """Requests whose grammar is there may run; those whose grammar cannot be compiled end."""
        now = time.monotonic()
        events = []
        for request, compilation in list(self._compiling.items()):
            ended = request.state is not State.WAITING_FOR_GRAMMAR
            if not ended and not compilation.finished(now):
                continue
            del self._compiling[request]
            if ended:
                continue
            try:
                self.scheduler.set_grammar(request, self._grammars.finish(compilation))
            except ServingError as error:
                event = self.scheduler.abort(request.request_id, now, error)
                events += [event] if event else []
        return events

    def _collect(self, step: Future[Launched]) -> StepResult:
        """Raises EngineUnavailable if a rank dies meanwhile, or falls silent."""
        while self._plan_broadcaster and not wait([step], POLL_INTERVAL_S).done:
            self._plan_broadcaster.check()
        launched = step.result()
        while self._plan_broadcaster and not launched.ready(POLL_INTERVAL_S):
            self._plan_broadcaster.check()
        return self.runner.collect(launched)

    def _submit(self, plan: StepPlan) -> None:
        self._submitted.append((time.monotonic(), StepWork.of(plan)))
        if self._plan_broadcaster:
            self._plan_broadcaster.send(plan)
        inputs = self.runner.prepare(plan)
        if self._executor:
            self._in_flight.append(self._executor.submit(self.runner.launch, inputs))
        else:
            done: Future[Launched] = Future()
            done.set_result(self.runner.launch(inputs))
            self._in_flight.append(done)

    def _took(self, request: Request, now: float) -> None:
        if self.idle:
            self.idle, self.last_step_at = False, now
        self._compile(request, now)
        if request.deadline_at is not None:
            heapq.heappush(self._deadlines, (request.deadline_at, request.order[1], request))

    def _expire(self) -> list[Event]:
        """End requests whose deadline has passed."""
        now = time.monotonic()
        events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            when, _, request = heapq.heappop(self._deadlines)
            if request.state not in (State.FINISHED, State.LEASED):
                error = RequestTimeout(request.request_id, when - request.arrived_at)
                event = self.scheduler.abort(request.request_id, now, error)
                assert event is not None or request.prefill_request is not None, (
                    "a request that is not finished is live"
                )
                events += [event] if event else []
        return events

    def stats(self) -> EngineStats:
        times = self.step_times
        per_step, per_token = times.by_tokens.coefficients
        decode_per_step, decode_per_sequence = times.by_sequences.coefficients
        return msgspec.structs.replace(
            self.scheduler.stats(),
            seconds_per_step=per_step,
            seconds_per_token=per_token,
            decode_seconds_per_step=decode_per_step,
            decode_seconds_per_sequence=decode_per_sequence,
            prompt_seconds_per_token=times.prompt_token_s,
            prefill_tokens=times.prefill_tokens,
            prefills=times.prefills,
        )

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last step ended; 0 when there is nothing to compute."""
        return time.monotonic() - self.last_step_at if self.has_work and not self.idle else 0.0

    def close(self) -> None:
        """Wait for the step that is computing, stop the thread, and let the other ranks end."""
        self._grammars.close()
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)
        if self.handoff_channel is not None:  # while the other ranks are there, which may be reading
            self.handoff_channel.close()
            self._kv_worker.close()
        if self._plan_broadcaster:
            self._plan_broadcaster.close()
        self._group.close()
