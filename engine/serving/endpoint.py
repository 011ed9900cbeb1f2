"""What an engine takes from the processes that use it, and tells them. Uses no sockets itself."""

from __future__ import annotations

import logging
from typing import Any, Literal, Protocol

import msgspec
import zmq

from engine.clock import Clock
from engine.core.door import inputs
from engine.core.engine import EngineCore
from engine.core.mail.courier import Courier
from engine.core.output import Event, take_timelines
from engine.distributed.refusals import REFUSALS, add_up
from engine.errors import Overloaded, ServingError
from engine.hooks import overriding
from engine.serving.kv_events import KVEventPublisher
from engine.serving.trial_queue import TrialQueue
from engine.source_digest import numerics_digest
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import (
    MAX_LIVE_HANDOFFS,
    Abort,
    Add,
    Command,
    Drain,
    EngineStatus,
    ResetPrefixCache,
    Subscribe,
)
from engine.wire.remote_request import KVSource
from engine.wire.stats.handoff_stats import HandoffInfo
from engine.wire.token_delta import ErrorInfo, TokenBatch, TokenDelta

logger = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
TIMELINE_PERIOD_S = 1.0  # after which a request without a token sends its timeline


class Receivers(Protocol):
    """The processes to which an engine sends messages, by address; PushSockets in production."""

    def connect(self, address: str) -> None:
        """Prepare to send to this address. Raises zmq.ZMQError if it is invalid."""

    def send(self, address: str, message: bytes) -> bool:
        """Send a message without blocking. Returns False if it is dropped."""

    def forget_unused(self) -> None:
        """Close the connections that have not been used for long."""


class EngineEndpoint:
    """Carries out commands for an EngineCore, and sends the outcome of its steps: see EngineServer."""

    def __init__(
        self,
        core: EngineCore,
        receivers: Receivers,
        *,
        engine_id: str,
        address: str,
        status_to: str,
        clock: Clock,
    ):
        """address: where this engine takes commands. status_to: address of the control actor."""
        self.core, self._peers, self._clock = core, receivers, clock
        self._engine_id, self._address, self._status_to = engine_id, address, status_to
        self._encode = msgspec.msgpack.Encoder().encode
        self._numerics = numerics_digest()
        self._kv_events = KVEventPublisher(engine_id, core.scheduler)
        self._deltas: dict[str, list[TokenDelta]] = {}  # by reply address, since the last step
        self._runs_when_idle: str | None = None  # id of the request that any other one aborts
        self._trials = TrialQueue()
        self._seen = overriding(core.mail.all, Courier.seen)
        self._ended: list[str] = []  # requests and remote prefills, since the last status
        self._status_due = self._timelines_due = clock.monotonic()

    def wait_s(self) -> float | None:
        """Return the seconds until something must be sent even if nothing happens; None if that is not known."""
        return self._kv_events.wait_s(self._clock.monotonic())

    def handle(self, command: Command) -> None:
        """Carry out a command. The replies are sent with those of the next step."""
        match command:
            case Add(request):
                self._add(request)
            case Abort(request_id, reason):
                self.abort(request_id, reason)
            case Drain():
                self._kv_events.draining = True
            case Subscribe():
                self._subscribe(command)
            case ResetPrefixCache():
                self.core.apply(inputs.CacheCleared())
            case _:
                if not any(courier.take(command, self) for courier in self.core.mail.all):
                    REFUSALS.add("commands", "unexpected", f"{type(command).__name__}: no part takes it")

    def _add(self, request: GenerateRequest) -> None:
        self.admitted(request.request_id)
        try:
            self._peers.connect(request.reply_to)
        except zmq.ZMQError as error:
            logger.error(
                "dropped request_id=%s: no reply can be sent to %r: %s", request.request_id, request.reply_to, error
            )
            self.ended(request.request_id)
            return
        if request.on_trial:
            self._trials.add(request)
            self._start_trials()
        else:
            self._start(request)

    def _start(self, request: GenerateRequest) -> None:
        try:
            if request.when_idle and self.core.scheduler.has_work:
                raise Overloaded("the engine has other requests, and this one may only run while there are none")
            self.make_way(request.request_id if request.when_idle else None)
            self.core.add(request)
        except ServingError as error:
            delta = TokenDelta(request_id=request.request_id, finish_reason="error", error=ErrorInfo.of(error))
            self._reply(request.reply_to, delta)

    def _start_trials(self) -> None:
        while (request := self._trials.next(self._clock.monotonic())) is not None:
            self._start(request)

    def make_way(self, runs_when_idle: str | None = None) -> None:
        """Abort the request, if any, that is served only while there is no other. runs_when_idle: id of a new request
        of this kind, which takes its place."""
        if self._runs_when_idle is not None:
            self.abort(self._runs_when_idle)
        self._runs_when_idle = runs_when_idle

    def abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        if (waiting := self._trials.remove(request_id)) is not None:
            self._reply(waiting.reply_to, TokenDelta(request_id=request_id, finish_reason=reason))
            return
        for event in self.core.abort(request_id, reason):
            self._reply(event.request.reply_to, event.delta)

    def _reply(self, address: str, delta: TokenDelta) -> None:
        self._deltas.setdefault(address, []).append(delta)
        self._trials.answered(delta.request_id, len(delta.token_ids), bool(delta.finish_reason))
        if delta.finish_reason and not delta.records(KVSource):  # else it ends once its KV is read
            self.ended(delta.request_id)

    def ended(self, request_id: str) -> None:
        """Report to routers and the control actor that a request or remote prefill has ended."""
        self._kv_events.finished(request_id)
        self._ended.append(request_id)

    def _subscribe(self, command: Subscribe) -> None:
        try:
            self._peers.connect(command.address)
        except zmq.ZMQError as error:
            logger.error("no update can be sent to %r: %s", command.address, error)
        else:
            self._kv_events.subscribe(command, self._clock.monotonic())

    def send(self, events: list[Event]) -> None:
        """Send what the last step has brought, and what is due."""
        now = self._clock.monotonic()
        if now >= self._timelines_due:
            live = self.core.scheduler.queue.live
            events = events + take_timelines(live.values(), self._clock.wall() - TIMELINE_PERIOD_S)
            self._timelines_due = now + TIMELINE_PERIOD_S
        for event in events:
            self._kv_events.prefilled(event)
            for seen in self._seen:
                seen(event)
            if event.request.asked_by is None or event.delta.records(KVSource):
                self._reply(event.request.reply_to, event.delta)
            else:  # the other engine knows of its end
                self.ended(event.request.request_id)
        self._start_trials()
        for notice in self.core.mail.take_notices():
            self.tell(notice)
        deltas_by_address, self._deltas = self._deltas, {}
        step = self.core.scheduler.totals.steps
        for address, deltas in deltas_by_address.items():
            batch = TokenBatch(
                engine_id=self._engine_id,
                commands_to=self._address,
                step=step,
                deltas=deltas,
                numerics=self._numerics,
            )
            self._push(address, self._encode(batch))
        for update, addresses in self._kv_events.messages(now):
            message = self._encode(update)
            for address in addresses:
                self._push(address, message)
        if self._ended or now >= self._status_due:
            self._send_status(now)

    def _send_status(self, now: float) -> None:
        fields: dict[str, Any] = {}
        live, refused = list[HandoffInfo](), [REFUSALS.counts()]
        for courier in self.core.mail.all:
            told = courier.status(self.core)
            live += told.pop("live_handoffs", ())
            refused.append(told.pop("refused", {}))
            fields |= told
        status = EngineStatus(
            engine_id=self._engine_id,
            ended=self._ended,
            stats=self.core.stats(),
            last_step_age_s=self.core.last_step_age_s,
            live_handoffs=live[:MAX_LIVE_HANDOFFS],
            refused=add_up(*refused),
            **fields,
        )
        self.tell(status)
        self._ended = []
        self._status_due = now + STATUS_PERIOD_S
        self._peers.forget_unused()

    # -- for couriers --------------------------------------------------------------------------------------

    def tell(self, notice: msgspec.Struct) -> None:
        self._push(self._status_to, self._encode(notice))

    def admitted(self, name: str) -> None:
        self._kv_events.admitted(name)

    def report_soon(self) -> None:
        self._status_due = self._clock.monotonic()

    def _push(self, address: str, message: bytes) -> None:
        if not self._peers.send(address, message):
            logger.warning("dropped a message to %s, which does not accept messages at present", address)
