"""The handoffs of one engine without threads and sockets: the protocol with its queues of actions and events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from engine.clock import SYSTEM_CLOCK, Clock
from engine.distributed.refusals import Counts, add_up
from engine.errors import EngineUnavailable
from engine.kv_transfer.protocol.messages import Attach, Envelope, KVWorkerAnswer, RankRefusals
from engine.kv_transfer.protocol.protocol import HandoffProtocol
from engine.wire.handoff import Closed, Failed, HandoffAction, HandoffEvent, Leave, Noted, Received
from engine.wire.stats.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.timeline import TimelineEvent

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # that running reads have to stop after Leave
MAX_WAIT_S = 1.0


class HandoffEndpoint:
    """Applies actions, messages and timers to the protocol, and carries out what it asks for.

    `submit` and `events` may be called from any thread. All other methods are for one thread at a time.
    """

    def __init__(
        self,
        protocol: HandoffProtocol,
        *,
        answers_to: str,
        send: Callable[[str, bytes], None],
        command: Callable[[bytes], None],
        wake: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ):
        """answers_to: address to which this engine's KV workers send their answers. send: function that sends a message
        to the channel at an address, and may lose it. command: function that sends a command to the KV workers of all
        ranks. wake: function called when `events` has something new."""
        self.peer = protocol.peer
        self._send, self._command, self._wake, self._clock = send, command, wake, clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._protocol = protocol
        self._protocol.out.commands.append(Attach(answers_to))
        self._refused: dict[int, Counts] = {}  # by rank above 0
        self._actions: deque[HandoffAction] = deque()
        self._events: deque[HandoffEvent] = deque()
        self._broken: str | None = None
        self._close_at: float | None = None  # latest end, after Leave

    def submit(self, *actions: HandoffAction) -> None:
        """Queue actions for the next `serve`."""
        self._actions.extend(actions)

    def events(self) -> list[HandoffEvent]:
        """Return the events since the last call. Raises EngineUnavailable if this engine must end."""
        if self._broken is not None:
            raise EngineUnavailable(self._broken)
        return [self._events.popleft() for _ in range(len(self._events))]

    def fail(self, reason: str) -> None:
        """Make `events` raise EngineUnavailable."""
        self._broken = reason
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether Leave was applied, and all reads have ended or had CLOSE_S to end."""
        if self._close_at is None:
            return False
        return not self._protocol.decode_handoffs or self._clock.monotonic() >= self._close_at

    def wait_s(self) -> float:
        """Return the seconds after which `serve` must be called even if nothing happens."""
        times = [at for at in (self._protocol.due, self._close_at) if at is not None]
        return min([MAX_WAIT_S, *(max(0.0, at - self._clock.monotonic()) for at in times)])

    def serve(self, answers: Iterable[KVWorkerAnswer] = (), envelopes: Iterable[Envelope] = ()) -> None:
        """Apply queued actions, answers of the KV workers, messages of other engines, and then timers: messages that
        arrived while this process was stopped still count."""
        now = self._clock.monotonic()
        self._apply_actions(now)
        for message in answers:
            if isinstance(message, RankRefusals):
                self._refused[message.rank] = message.counts
            else:
                self._protocol.read_ended(message, now)
        for envelope in envelopes:
            # a handoff is opened before its prefill request is sent, and so before any answer arrives
            self._apply_actions(now)
            self._protocol.receive(envelope, now)
        self._protocol.tick(now)
        self.flush()

    def quarantined(self) -> list[str]:
        return self._protocol.quarantined()

    def snapshot(self) -> list[HandoffInfo]:
        return self._protocol.snapshot(self._clock.monotonic())

    def stats(self) -> HandoffStats:
        return self._protocol.stats()

    def refused_by_ranks(self) -> Counts:
        return add_up(*self._refused.values())

    def _apply_actions(self, now: float) -> None:
        while self._actions:
            action = self._actions.popleft()
            self._protocol.apply(action, now)
            if isinstance(action, Leave):
                self._close_at = now + CLOSE_S

    def flush(self) -> None:
        """Carry out the effects that the protocol asks for."""
        out = self._protocol.out
        for command in out.commands:
            self._command(self._encode(command))
        for to, message in out.messages:
            self._send(to.address, self._encode(Envelope(self.peer, to.epoch, message)))
        for request_id, line in out.lines:
            self._events.append(Noted(request_id, TimelineEvent.now(line)))  # not worth waking the step loop
        for event in out.events:
            _log(event)
        broken = self._protocol.broken
        if broken is not None and self._broken is None:
            logger.error("the engine must end: %s", broken)
            self.fail(broken)
        if out.events and self._close_at is None:
            self._events.extend(out.events)
            self._wake()
        for done in (out.commands, out.messages, out.lines, out.events):
            done.clear()


def _log(event: HandoffEvent) -> None:
    if isinstance(event, Failed):
        level = logging.INFO if event.reason == "cancelled" else logging.WARNING
        what = f"{event.reason} {event.detail} verified={event.verified} retry={event.retry}"
        logger.log(level, "handoff failed handoff_id=%s reason=%s", event.handoff_id, what)
    elif isinstance(event, Closed):
        logger.info("handoff closed handoff_id=%s reason=%s", event.handoff_id, event.reason)
    elif isinstance(event, Received):
        logger.info("handoff received handoff_id=%s", event.handoff_id)
