"""What an engine takes from the processes that use it, and tells them. Uses no sockets itself."""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import msgspec
import zmq

from engine.clock import Clock
from engine.core.door import inputs
from engine.core.engine import EngineCore
from engine.core.output import Event, take_timelines
from engine.distributed.refusals import REFUSALS, add_up
from engine.errors import Overloaded, ServingError
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import MovesAsked, ReplicasSet, RoleSet, StuckRefused
from engine.parts.holds.inputs import HoldsGiven, HoldsReleased
from engine.parts.images.encoder_cache_manager import EncoderCacheManager
from engine.parts.images.image_courier import ImageCourier
from engine.parts.images.inputs import EncodersSet
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_fetching.prefix_counter import PrefixCounter
from engine.parts.lora.adapter_courier import AdapterCourier
from engine.parts.lora.inputs import AdapterNumbered
from engine.serving.kv_events import KVEventPublisher
from engine.serving.trial_queue import TrialQueue
from engine.wire.generate_request import GenerateRequest
from engine.wire.lora import LoRARequest
from engine.wire.messages import (
    MAX_LIVE_HANDOFFS,
    Abort,
    AdapterLoaded,
    Add,
    CancelPrefill,
    Command,
    Drain,
    EngineStatus,
    GiveHolds,
    HeldPrompts,
    HotPrefixes,
    ListHotPrefixes,
    LoadAdapter,
    MoveRequests,
    Prefill,
    PrefillReplicas,
    ReleaseHolds,
    RemoteRequestFailed,
    ResetPrefixCache,
    SetRole,
    Subscribe,
    TakeTape,
    TapeTaken,
)
from engine.wire.stats.handoff_stats import Role
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
        num_ranks: int,
        clock: Clock,
    ):
        """address: where this engine takes commands. status_to: address of the control actor."""
        self._core, self._peers, self._clock = core, receivers, clock
        self._engine_id, self._address, self._status_to = engine_id, address, status_to
        self._encode = msgspec.msgpack.Encoder().encode
        self._kv_events = KVEventPublisher(engine_id, core.scheduler)
        self._prefixes = PrefixCounter(core.scheduler.kv_cache, num_ranks)
        self._deltas: dict[str, list[TokenDelta]] = {}  # by reply address, since the last step
        self._runs_when_idle: str | None = None  # id of the request that any other one aborts
        self._trials = TrialQueue()
        self._handoff_mail, self._image_mail = core.mail.get(HandoffCourier), core.mail.get(ImageCourier)
        self._handoffs = core.scheduler.parts.get(Handoffs)
        self._images = core.scheduler.parts.get(EncoderCacheManager)
        fetching = core.scheduler.parts.get(KVFetching)
        self._fetching_peer = None if fetching is None else fetching.peer
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
                self._abort(request_id, reason)
            case MoveRequests(count):
                self._move(count)
            case GiveHolds(call_id, limit):
                self._give_holds(call_id, limit)
            case Drain():
                self._kv_events.draining = True
            case SetRole(role):
                self._set_role(role)
            case Subscribe():
                self._subscribe(command)
            case ReleaseHolds(name, client):
                self._core.apply(HoldsReleased(name, client))
            case ResetPrefixCache():
                self._core.apply(inputs.CacheCleared())
            case ListHotPrefixes(call_id, limit):
                self._list_hot_prefixes(call_id, limit)
            case LoadAdapter(call_id, lora):
                self._load_adapter(call_id, lora)
            case TakeTape(call_id):
                self._push(self._status_to, self._encode(TapeTaken(call_id, self._core.tape.take())))
            case _:
                self._hand_over(command)

    def _add(self, request: GenerateRequest) -> None:
        self._kv_events.admitted(request.request_id)
        try:
            self._peers.connect(request.reply_to)
        except zmq.ZMQError as error:
            logger.error(
                "dropped request_id=%s: no reply can be sent to %r: %s", request.request_id, request.reply_to, error
            )
            self._end(request.request_id)
            return
        if request.on_trial:
            self._trials.add(request)
            self._start_trials()
        else:
            self._start(request)

    def _start(self, request: GenerateRequest) -> None:
        try:
            if request.when_idle and self._core.scheduler.has_work:
                raise Overloaded("the engine has other requests, and this one may only run while there are none")
            self._make_way(request.request_id if request.when_idle else None)
            self._core.add(request)
        except ServingError as error:
            delta = TokenDelta(request_id=request.request_id, finish_reason="error", error=ErrorInfo.of(error))
            self._reply(request.reply_to, delta)

    def _start_trials(self) -> None:
        while (request := self._trials.next(self._clock.monotonic())) is not None:
            self._start(request)

    def _load_adapter(self, call_id: str, lora: LoRARequest) -> None:
        try:
            number = self._core.apply(AdapterNumbered(lora))
            self._core.mail[AdapterCourier].call(number, call_id)
            self._core.idle = False
        except ServingError as error:
            self._push(self._status_to, self._encode(AdapterLoaded(call_id, ErrorInfo.of(error))))

    def _make_way(self, runs_when_idle: str | None = None) -> None:
        """Abort the request, if any, that is served only while there is no other. runs_when_idle: id of a new request
        of this kind, which takes its place."""
        if self._runs_when_idle is not None:
            self._abort(self._runs_when_idle)
        self._runs_when_idle = runs_when_idle

    def _abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        if (waiting := self._trials.remove(request_id)) is not None:
            self._reply(waiting.reply_to, TokenDelta(request_id=request_id, finish_reason=reason))
            return
        for event in self._core.abort(request_id, reason):
            self._reply(event.request.reply_to, event.delta)

    def _move(self, count: int) -> None:
        if self._handoff_mail is None:
            REFUSALS.add("commands", "unexpected", "MoveRequests: this engine does not hand over KV")
            return
        self._core.apply(MovesAsked(count))
        for event in self._core.take_events():
            self._reply(event.request.reply_to, event.delta)

    def _list_hot_prefixes(self, call_id: str, limit: int) -> None:
        peer = self._fetching_peer
        if peer is None:
            REFUSALS.add("commands", "unexpected", "ListHotPrefixes: no engine fetches from this one")
            return
        self._push(self._status_to, self._encode(HotPrefixes(call_id, peer, self._prefixes.hottest(limit))))

    def _give_holds(self, call_id: str, limit: int) -> None:
        prompts = self._core.apply(HoldsGiven(limit))
        self._push(self._status_to, self._encode(HeldPrompts(call_id, self._fetching_peer, prompts)))

    def _set_role(self, role: Role) -> None:
        handoffs = self._handoffs
        if handoffs is None or handoffs.role is None:
            REFUSALS.add("commands", "unexpected", "SetRole: the role of this engine does not change")
        elif role != handoffs.role:
            self._core.apply(RoleSet(role))
            self._status_due = self._clock.monotonic()  # the control actors of other engines ask for the status

    def _reply(self, address: str, delta: TokenDelta) -> None:
        self._deltas.setdefault(address, []).append(delta)
        self._trials.answered(delta.request_id, len(delta.token_ids), bool(delta.finish_reason))
        if delta.finish_reason and delta.kv_source is None:  # else it ends once its KV is read
            self._end(delta.request_id)

    def _end(self, request_id: str) -> None:
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

    def _hand_over(self, command: Prefill | CancelPrefill | RemoteRequestFailed | PrefillReplicas) -> None:
        core, handoffs, encoders, images = self._core, self._handoff_mail, self._image_mail, self._images
        if encoders is not None and images is not None:
            match command:
                case PrefillReplicas(replicas, "encode"):
                    core.apply(EncodersSet(replicas))
                    return
                case RemoteRequestFailed(handoff_id) if images.handoffs.owns(handoff_id):
                    encoders.channel.submit(command)
                    return
        if handoffs is None:
            REFUSALS.add("commands", "unexpected", f"{type(command).__name__}: this engine does not hand over KV")
            return
        match command:
            case Prefill(remote_request):
                self._make_way()
                self._kv_events.admitted(remote_request.handoff_id)
                if not handoffs.prefill(core, remote_request):
                    self._end(remote_request.handoff_id)
            case CancelPrefill(handoff_id):
                self._abort(handoff_id)
            case RemoteRequestFailed():
                handoffs.channel.submit(command)
            case PrefillReplicas(replicas):
                core.apply(ReplicasSet(replicas))

    def send(self, events: list[Event]) -> None:
        """Send what the last step has brought, and what is due."""
        now = self._clock.monotonic()
        if now >= self._timelines_due:
            live = self._core.scheduler.queue.live
            events = events + take_timelines(live.values(), self._clock.wall() - TIMELINE_PERIOD_S)
            self._timelines_due = now + TIMELINE_PERIOD_S
        for event in events:
            self._kv_events.prefilled(event)
            if event.delta.token_ids and not event.delta.position and self._fetching_peer:
                self._prefixes.observe(event.request)
            if event.request.asked_by is None or event.delta.kv_source is not None:
                self._reply(event.request.reply_to, event.delta)
            else:  # the other engine knows of its end
                self._end(event.request.request_id)
        self._start_trials()
        for notice in self._core.mail.take_notices():
            self._push(self._status_to, self._encode(notice))
        deltas_by_address, self._deltas = self._deltas, {}
        step = self._core.scheduler.totals.steps
        for address, deltas in deltas_by_address.items():
            batch = TokenBatch(engine_id=self._engine_id, commands_to=self._address, step=step, deltas=deltas)
            self._push(address, self._encode(batch))
        for update, addresses in self._kv_events.messages(now):
            message = self._encode(update)
            for address in addresses:
                self._push(address, message)
        if self._ended or now >= self._status_due:
            if self._handoffs is not None and self._handoffs.role:  # else no other engine asks for prompts
                self._core.apply(StuckRefused())
            self._send_status(now)

    def _send_status(self, now: float) -> None:
        handoffs, couriers = self._handoffs, (self._handoff_mail, self._image_mail)
        channel, image_channel = (None if courier is None else courier.channel for courier in couriers)
        channels = [each for each in (channel, image_channel) if each is not None]
        status = EngineStatus(
            engine_id=self._engine_id,
            ended=self._ended,
            stats=self._core.stats(),
            last_step_age_s=self._core.last_step_age_s,
            handoffs=None if channel is None else channel.stats(),
            image_handoffs=None if image_channel is None else image_channel.stats(),
            live_handoffs=[live for each in channels for live in each.snapshot()][:MAX_LIVE_HANDOFFS],
            fingerprint="" if handoffs is None else handoffs.requests.fingerprint,
            encode_fingerprint="" if self._images is None else self._images.handoffs.fingerprint,
            refused=add_up(REFUSALS.counts(), *(each.refused_by_ranks() for each in channels)),
            role=None if handoffs is None else handoffs.role,
            role_changes=0 if handoffs is None else handoffs.role_changes,
        )
        self._push(self._status_to, self._encode(status))
        self._ended = []
        self._status_due = now + STATUS_PERIOD_S
        self._peers.forget_unused()

    def _push(self, address: str, message: bytes) -> None:
        if not self._peers.send(address, message):
            logger.warning("dropped a message to %s, which does not accept messages at present", address)
