"""ZMQ sockets of an engine core: requests come in and tokens go out as msgspec messages."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Literal

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core.build import build_engine
from engine.core.features.handoffs import STUCK
from engine.core.features.prefix_counter import PrefixCounter
from engine.core.kv_events import KVEventPublisher
from engine.core.output import Event, take_timelines
from engine.distributed.refusals import REFUSALS, add_up
from engine.distributed.sockets import PullSocket, PushSockets, Waker
from engine.distributed.tp_group import TPGroup
from engine.errors import Overloaded, ServingError
from engine.wire.handoff_stats import Role
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
    ErrorInfo,
    GenerateRequest,
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
    TokenBatch,
    TokenDelta,
)

logger = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
TIMELINE_PERIOD_S = 1.0  # after which a request without a token sends its timeline
QUEUED_MESSAGES = 100_000  # per receiver that does not take them; further ones are dropped
POLL_MS = 200  # while there is nothing to compute


class EngineServer:
    """Serves an EngineCore in the process of rank 0.

    Takes `Command`s on a PULL socket at `address`. Pushes:
    - one `TokenBatch` per step to each ingress with requests in that step,
    - an `EngineStatus` to the control actor whenever requests end, and at least once a second,
    - requests for prefill by other engines, also to the control actor,
    - an `EngineUpdate` to each router that subscribes.

    The loop waits for commands and handoffs while there is nothing to compute. Sending never blocks it: messages that a
    vanished peer does not take are dropped with its socket.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: str,
        status_to: str,
        host: str = "127.0.0.1",
        group: TPGroup | None = None,
    ):
        """status_to: address of the control actor. group: as for build_engine; only peers with its key can send
        commands or receive messages."""
        group = group or TPGroup.single()
        self.engine_id = engine_id
        self._waker = Waker()
        self._core = build_engine(config, group, engine_id=engine_id, host=host, wake=self._waker.wake)
        self.max_model_len = self._core.max_model_len
        self._context = zmq.Context()
        self._inbox: PullSocket[Command] = PullSocket(self._context, host, Command, name="commands", key=group.key)
        self.address = self._inbox.address
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._waker, zmq.POLLIN)
        self._peers = PushSockets(self._context, {zmq.SNDHWM: QUEUED_MESSAGES}, group.key)
        self._status_to = status_to
        self._encode = msgspec.msgpack.Encoder().encode
        self._kv_events = KVEventPublisher(engine_id, self._core.scheduler)
        self._prefixes = PrefixCounter(self._core.scheduler.kv_cache, group.size)
        self._deltas: dict[str, list[TokenDelta]] = {}  # by reply address, since the last step
        self._runs_when_idle: str | None = None  # id of the request that any other one aborts
        self._ended: list[str] = []  # requests and remote prefills, since the last status
        self._status_due = self._timelines_due = time.monotonic()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve until `stop` is called from another thread, then close the sockets and end the other ranks.

        Raises EngineUnavailable if another rank dies.
        """
        try:
            while not self._stopping.is_set():
                self._receive()
                self._send(self._core.step())
        finally:
            self._core.close()
            self._context.destroy(linger=0)
            self._waker.close()

    def stop(self) -> None:
        self._stopping.set()
        self._waker.wake()

    def _receive(self) -> None:
        """Handle all received commands; wait for one while there is nothing to compute."""
        next_update_s = self._kv_events.wait_s(time.monotonic())
        wait_ms = POLL_MS if next_update_s is None else min(POLL_MS, math.ceil(next_update_s * 1000))
        if self._core.idle and self._waker.fileno() in dict(self._poller.poll(wait_ms)):
            self._waker.clear()
        for command in self._inbox.messages():
            match command:
                case Add(request):
                    self._add(request)
                case Abort(request_id, reason):
                    self._abort(request_id, reason)
                case MoveRequests(count):
                    self._move(count)
                case Drain():
                    self._kv_events.draining = True
                case SetRole(role):
                    self._set_role(role)
                case Subscribe():
                    self._subscribe(command)
                case ReleaseHolds(name, client):
                    self._core.scheduler.holds.release(name, client)
                case ResetPrefixCache():
                    self._core.scheduler.clear_cache()
                case ListHotPrefixes(call_id, limit):
                    self._list_hot_prefixes(call_id, limit)
                case LoadAdapter(call_id, lora):
                    self._load_adapter(call_id, lora)
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
        try:
            if request.when_idle and self._core.scheduler.has_work:
                raise Overloaded("the engine has other requests, and this one may only run while there are none")
            self._make_way(request.request_id if request.when_idle else None)
            self._core.add(request)
        except ServingError as error:
            delta = TokenDelta(request_id=request.request_id, finish_reason="error", error=ErrorInfo.of(error))
            self._reply(request.reply_to, delta)

    def _load_adapter(self, call_id: str, lora: LoRARequest) -> None:
        try:
            self._core.load_adapter(lora, call_id)
        except ServingError as error:
            self._push(self._status_to, self._encode(AdapterLoaded(call_id, ErrorInfo.of(error))))

    def _make_way(self, runs_when_idle: str | None = None) -> None:
        """Abort the request, if any, that is served only while there is no other. runs_when_idle: id of a new request
        of this kind, which takes its place."""
        if self._runs_when_idle is not None:
            self._abort(self._runs_when_idle)
        self._runs_when_idle = runs_when_idle

    def _abort(self, request_id: str, reason: Literal["abort", "stop"] = "abort") -> None:
        event = self._core.abort(request_id, reason)
        if event is not None:
            self._reply(event.request.reply_to, event.delta)

    def _move(self, count: int) -> None:
        if self._core.handoff_channel.peer is None:
            self._inbox.refuse("unexpected", "MoveRequests: this engine does not hand over KV")
            return
        for event in self._core.move(count):
            self._reply(event.request.reply_to, event.delta)

    def _list_hot_prefixes(self, call_id: str, limit: int) -> None:
        peer = self._core.scheduler.fetching.peer
        if peer is None:
            self._inbox.refuse("unexpected", "ListHotPrefixes: no engine fetches from this one")
            return
        self._push(self._status_to, self._encode(HotPrefixes(call_id, peer, self._prefixes.hottest(limit))))

    def _set_role(self, role: Role) -> None:
        handoffs = self._core.scheduler.handoffs
        if handoffs.role is None:
            self._inbox.refuse("unexpected", "SetRole: the role of this engine does not change")
        elif role != handoffs.role:
            handoffs.switch(role)
            self._status_due = time.monotonic()  # the control actors of other engines ask for the status

    def _reply(self, address: str, delta: TokenDelta) -> None:
        self._deltas.setdefault(address, []).append(delta)
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
            self._kv_events.subscribe(command, time.monotonic())

    def _hand_over(self, command: Prefill | CancelPrefill | RemoteRequestFailed | PrefillReplicas) -> None:
        channel, images = self._core.handoff_channel, self._core.image_handoffs
        match command:
            case PrefillReplicas(replicas, "encode") if images.channel.peer is not None:
                images.replicas = replicas
                return
            case RemoteRequestFailed(handoff_id) if images.owns(handoff_id):
                images.channel.submit(command)
                return
        if channel.peer is None:
            self._inbox.refuse("unexpected", f"{type(command).__name__}: this engine does not hand over KV")
            return
        match command:
            case Prefill(remote_request):
                self._make_way()
                self._kv_events.admitted(remote_request.handoff_id)
                if not self._core.prefill(remote_request):
                    self._end(remote_request.handoff_id)
            case CancelPrefill(handoff_id):
                self._abort(handoff_id)
            case RemoteRequestFailed():
                channel.submit(command)
            case PrefillReplicas(replicas):
                self._core.scheduler.handoffs.set_prefill_replicas(replicas)

    def _send(self, events: list[Event]) -> None:
        now = time.monotonic()
        if now >= self._timelines_due:
            live = self._core.scheduler.queue.live
            events = events + take_timelines(live.values(), time.time() - TIMELINE_PERIOD_S)
            self._timelines_due = now + TIMELINE_PERIOD_S
        for event in events:
            self._kv_events.prefilled(event)
            if event.delta.token_ids and not event.delta.position and self._core.scheduler.fetching.peer:
                self._prefixes.observe(event.request)
            if event.request.asked_by is None or event.delta.kv_source is not None:
                self._reply(event.request.reply_to, event.delta)
            else:  # the other engine knows of its end
                self._end(event.request.request_id)
        for notice in self._core.take_notices():
            self._push(self._status_to, self._encode(notice))
        deltas_by_address, self._deltas = self._deltas, {}
        step = self._core.scheduler.totals.steps
        for address, deltas in deltas_by_address.items():
            batch = TokenBatch(engine_id=self.engine_id, commands_to=self.address, step=step, deltas=deltas)
            self._push(address, self._encode(batch))
        for update, addresses in self._kv_events.messages(now):
            message = self._encode(update)
            for address in addresses:
                self._push(address, message)
        if self._ended or now >= self._status_due:
            self._refuse_stuck(now)
            self._send_status(now)

    def _refuse_stuck(self, now: float) -> None:
        """Refuse prompts of other engines that could wait for blocks forever."""
        scheduler = self._core.scheduler
        for request in scheduler.handoffs.stuck(scheduler.queue, now):
            scheduler.abort(request.request_id, now, Overloaded(STUCK))

    def _send_status(self, now: float) -> None:
        handoffs, channel, images = self._core.scheduler.handoffs, self._core.handoff_channel, self._core.image_handoffs
        status = EngineStatus(
            engine_id=self.engine_id,
            ended=self._ended,
            stats=self._core.stats(),
            last_step_age_s=self._core.last_step_age_s,
            handoffs=channel.stats(),
            image_handoffs=images.channel.stats(),
            live_handoffs=[*channel.snapshot(), *images.channel.snapshot()][:MAX_LIVE_HANDOFFS],
            fingerprint=handoffs.fingerprint,
            encode_fingerprint=images.fingerprint,
            refused=add_up(REFUSALS.counts(), channel.refused_by_ranks(), images.channel.refused_by_ranks()),
            role=handoffs.role,
            role_changes=handoffs.role_changes,
        )
        self._push(self._status_to, self._encode(status))
        self._ended = []
        self._status_due = now + STATUS_PERIOD_S
        self._peers.forget_unused()

    def _push(self, address: str, message: bytes) -> None:
        if not self._peers.send(address, message):
            logger.warning("dropped a message to %s, which does not accept messages at present", address)
