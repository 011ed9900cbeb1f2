"""Thread and sockets of the handoff protocol, separate from the step loop. See protocol/protocol.py."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from engine.config import HandoffConfig
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.refusals import Counts, add_up
from engine.distributed.sockets import PullSocket, PushSockets, Waker
from engine.errors import EngineUnavailable
from engine.kv_transfer.protocol.messages import Attach, Envelope, KVWorkerAnswer, RankRefusals
from engine.kv_transfer.protocol.protocol import HandoffProtocol
from engine.kv_transfer.transport.ranks import KVWorkerInfo
from engine.wire.handoff import Closed, Failed, HandoffAction, HandoffEvent, Leave, Noted, Received
from engine.wire.handoff_stats import HandoffInfo, HandoffStats
from engine.wire.remote_request import Peer
from engine.wire.timeline import TimelineEvent

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # that `close` waits for running reads to stop
LINGER_MS = 200  # that `close` waits for the last messages to leave
MAX_POLL_S = 1.0
MAX_QUEUED_MESSAGES = 1000  # per peer that does not take them; the protocol tolerates the loss of further ones
# in ms: connections over a broken link are detected, and replaced
PING: dict[int, int] = {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 5000}


class HandoffChannel:
    """Handoffs of one engine, at its rank 0.

    All methods may be called from any thread; only `close` blocks.
    """

    def __init__(
        self,
        config: HandoffConfig,
        *,
        engine_id: str,
        host: str,
        workers: Sequence[KVWorkerInfo],
        block_size: int,
        wake: Callable[[], None],
        key: ClusterKey | None = None,
    ):
        """workers: KV workers of all ranks, in rank order.
        wake: function called from the channel's thread when `events` has something new; must not block.
        key: cluster key, shared with the KV workers and all other engines."""
        self._wake = wake
        self._context = zmq.Context()
        self._inbox: PullSocket[Envelope] = PullSocket(self._context, host, Envelope, name="handoffs", key=key)
        self._answers: PullSocket[KVWorkerAnswer] = PullSocket(  # from this engine's KV workers
            self._context, host, KVWorkerAnswer, name="kv_worker_answers", key=key
        )
        self._refused: dict[int, Counts] = {}  # by rank above 0
        self.peer = Peer(engine_id, self._inbox.address, random.SystemRandom().getrandbits(64))
        self._peers = PushSockets(self._context, PING | {zmq.SNDHWM: MAX_QUEUED_MESSAGES}, key)
        self._workers = PushSockets(self._context, PING, key)
        self._worker_addresses = [worker.address for worker in workers]
        self._encode = msgspec.msgpack.Encoder().encode
        self._protocol = HandoffProtocol(
            config, self.peer, ranks=[worker.description for worker in workers], block_size=block_size
        )
        self._protocol.out.commands.append(Attach(self._answers.address))
        self._lock = threading.Lock()  # guards _protocol and _refused
        self._actions: deque[HandoffAction] = deque()
        self._events: deque[HandoffEvent] = deque()
        self._broken: str | None = None
        self._close_at: float | None = None  # latest end of the thread, once `close` is called
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"handoff-channel {engine_id}", daemon=True)
        self._thread.start()

    def submit(self, *actions: HandoffAction) -> None:
        """Queue actions for the protocol to apply in order. The messages that result from one call are sent
        together."""
        self._actions.extend(actions)
        self._waker.wake()

    def events(self) -> list[HandoffEvent]:
        """Return the events since the last call.

        Raises EngineUnavailable if this engine must end: the channel's thread has died, or a rank did not stop writing
        into blocks, so that these blocks can never be used again.
        """
        if self._broken is not None:
            raise EngineUnavailable(self._broken)
        return [self._events.popleft() for _ in range(len(self._events))]

    def quarantined(self) -> list[str]:
        """Return the ids of engines that should get no prefill requests for now."""
        with self._lock:
            return self._protocol.quarantined()

    def snapshot(self) -> list[HandoffInfo]:
        with self._lock:
            return self._protocol.snapshot(time.monotonic())

    def stats(self) -> HandoffStats:
        with self._lock:
            return self._protocol.stats()

    def refused_by_ranks(self) -> Counts:
        """Return the counts of messages refused by ranks above 0. These ranks report them only to this channel."""
        with self._lock:
            return add_up(*self._refused.values())

    def close(self) -> None:
        """Notify the peers, stop all reads, and end the thread, within about two seconds. No further events come."""
        self.submit(Leave())
        self._thread.join(CLOSE_S + 2 * LINGER_MS / 1000 + MAX_POLL_S)

    # -- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whatever it is: the step loop must not wait for handoffs forever
            logger.exception("the handoff channel has failed")
            self._broken = f"the handoff channel has failed: {error!r}"
            self._wake()
        finally:
            self._context.destroy(linger=LINGER_MS)
            self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._inbox.socket, self._answers.socket, self._waker):
            poller.register(source, zmq.POLLIN)
        self._flush(time.monotonic())
        while self._close_at is None or (self._protocol.decode_handoffs and time.monotonic() < self._close_at):
            due = self._protocol.due
            wait_s = MAX_POLL_S if due is None else min(MAX_POLL_S, max(0.0, due - time.monotonic()))
            if self._close_at is not None:
                wait_s = min(wait_s, max(0.0, self._close_at - time.monotonic()))
            ready = dict(poller.poll(int(1000 * wait_s) + 1))  # + 1: wake after the due time, never just before it
            now = time.monotonic()
            if self._waker.fileno() in ready:
                self._waker.clear()
            with self._lock:
                # messages before timers: those that arrived while this process was stopped still count
                self._receive(now)
                self._protocol.tick(now)
                self._flush(now)

    def _receive(self, now: float) -> None:
        self._apply_actions(now)
        for message in self._answers.messages():
            if isinstance(message, RankRefusals):
                self._refused[message.rank] = message.counts
            else:
                self._protocol.read_ended(message, now)
        for envelope in self._inbox.messages():
            # a handoff is opened before its prefill request is sent, and so before any answer arrives
            self._apply_actions(now)
            self._protocol.receive(envelope, now)

    def _apply_actions(self, now: float) -> None:
        while self._actions:
            action = self._actions.popleft()
            self._protocol.apply(action, now)
            if isinstance(action, Leave):
                self._close_at = now + CLOSE_S

    def _flush(self, now: float) -> None:
        """Carry out the effects that the protocol asks for."""
        out = self._protocol.out
        for command in out.commands:
            data = self._encode(command)
            for worker in self._worker_addresses:
                self._workers.send(worker, data)
        for to, message in out.messages:
            self._send(to.address, self._encode(Envelope(self.peer, to.epoch, message)))
        for request_id, line in out.lines:
            self._events.append(Noted(request_id, TimelineEvent.now(line)))  # not worth waking the step loop
        for event in out.events:
            _log(event)
        broken = self._protocol.broken
        if broken is not None and self._broken is None:
            logger.error("the engine must end: %s", broken)
            self._broken = broken
            self._wake()
        if out.events and self._close_at is None:
            self._events.extend(out.events)
            self._wake()
        for done in (out.commands, out.messages, out.lines, out.events):
            done.clear()
        self._peers.forget_unused()

    def _send(self, address: str, data: bytes) -> None:
        try:
            self._peers.send(address, data)  # if it is lost, the protocol repeats it or gives up
        except zmq.ZMQError as error:
            self._inbox.refuse("unexpected", f"cannot send to {address!r}: {error}")


def _log(event: HandoffEvent) -> None:
    if isinstance(event, Failed):
        level = logging.INFO if event.reason == "cancelled" else logging.WARNING
        what = f"{event.reason} {event.detail} verified={event.verified} retry={event.retry}"
        logger.log(level, "handoff failed handoff_id=%s reason=%s", event.handoff_id, what)
    elif isinstance(event, Closed):
        logger.info("handoff closed handoff_id=%s reason=%s", event.handoff_id, event.reason)
    elif isinstance(event, Received):
        logger.info("handoff received handoff_id=%s", event.handoff_id)
