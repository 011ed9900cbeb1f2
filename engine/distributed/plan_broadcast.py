"""Keeps all ranks synchronized: rank 0 broadcasts every plan once, and the other ranks execute it without replying.

All ranks get the same logits and draw the same random numbers, so each rank finds the sampled tokens by itself. A later
plan carries a checksum of the tokens that rank 0 sampled, and a rank that sampled different tokens stops. For the cost
see docs/measurements/performance.md.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
import zlib
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

import msgspec
import zmq

from engine.distributed.handshake_monitor import HandshakeMonitor
from engine.distributed.refusals import REFUSALS
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable, RendezvousTimeout
from engine.wire.part_record import PartRecord, Records, encoded, record_in
from engine.wire.plan import SampledStep, StepPlan, StepResult

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0  # between checks that all ranks live, while a step computes
POLL_S = 0.01  # between such checks, after a step has failed
JOIN_TIMEOUT_S = 30.0  # for ranks to join after all have loaded the model
HEARTBEAT_MS = 1000
SILENCE_MS = 10_000  # without an answer to heartbeats after which a peer counts as gone
LINGER_MS = 1000
HELLO, GONE = b"\x01", b"\x00"  # an XPUB socket receives these, then a topic, when a rank subscribes or leaves
ANSWER = b"answer "  # with it begins the topic that stands for an answer of a part: no rank ever publishes it
TOPIC = re.compile(rb"rank (\d{1,6})")
NAME = "plans"  # name of the socket in metrics

R = TypeVar("R", bound=PartRecord)


class Launched(Protocol):
    """A step in the device's queue."""

    @property
    def event(self) -> StepEvent: ...


class StepEvent(Protocol):
    def reached(self, timeout_s: float) -> bool: ...


L = TypeVar("L", bound=Launched)


class PlanMessage(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Counts from 1, so that a lost message is noticed."""
    plan: StepPlan | None
    """None to end the other ranks, unless there is a command."""
    checked: int
    """Step whose tokens `checksum` covers; 0 if none."""
    checksum: int
    command: Records = {}
    """A command to one part of each rank, which is sent instead of a plan."""
    sampled: list[SampledStep] = []
    """Sampled tokens that this or a later plan needs, for ranks in pipeline stages that do not sample."""


class PlanBroadcaster:
    """Rank 0's end of the broadcast. Used by one thread at a time."""

    def __init__(self, group: TPGroup, tells_tokens: bool = False):
        """Wait until all ranks have loaded their model and are listening. Raises StartupError.

        tells_tokens: whether other ranks need the tokens of committed steps, since they do not sample."""
        self._group, self._tells_tokens = group, tells_tokens
        self._sampled: list[SampledStep] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never drop a plan; rank 0 is at most one step ahead
        _set_heartbeat(self._socket)
        if group.key is not None:
            group.key.guard_listener(self._socket)
        self._monitor = HandshakeMonitor(self._context, self._socket, NAME)
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = self._checked = self._checksum = 0
        self._gone: int | None = None
        self._answers: list[Records] = []  # each of one part
        try:
            group.exchange(self._bind(group))
            self._wait_for(set(range(1, group.size)))
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def send(self, plan: StepPlan | None) -> None:
        """Send a plan without waiting; None ends the other ranks. Lost ranks are noticed only by `check`."""
        self._number += 1
        message = PlanMessage(self._number, plan, self._checked, self._checksum, sampled=self._sampled)
        self._sampled = []
        self._socket.send(self._encode(message), zmq.NOBLOCK)

    def command(self, command: PartRecord) -> None:
        """Send a command to the part that it names on all other ranks."""
        self._number += 1
        self._socket.send(self._encode(PlanMessage(self._number, None, 0, 0, encoded(command))), zmq.NOBLOCK)

    def take_answers(self, kind: type[R]) -> list[R]:
        """Return what a part of the other ranks has answered to commands and plans since the last call. kind: the one
        kind of answer that it gives. Raises like `check`."""
        self.check()
        answers = [answer for records in self._answers if (answer := record_in(records, kind)) is not None]
        if answers:
            self._answers = [records for records in self._answers if kind.part not in records]
        return answers

    def committed(self, result: StepResult) -> None:
        """Record a step's tokens, so that the other ranks can compare them with their own."""
        self._checked, self._checksum = result.step, checksum(result)
        if self._tells_tokens:
            self._sampled.append(SampledStep(result.step, result.tokens))

    def check(self) -> None:
        """Raise EngineUnavailable if a rank is gone."""
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            word, rank = self._receive()
            if word == GONE and rank is not None and self._gone is None:  # later ones end because of the first
                self._gone = rank
        self._monitor.look()
        if self._gone is not None:
            reason = f"rank {self._gone} is gone"
            self._group.abort(reason)  # a step may be waiting for it
            raise EngineUnavailable(reason)

    def result(self, step: Future[L]) -> L:
        """Wait until a step has been launched and computed. Raises EngineUnavailable if a rank dies or hangs
        meanwhile."""
        while not wait([step], CHECK_INTERVAL_S).done:
            self.check()
        try:
            launched = step.result()
        except EngineUnavailable:
            self._name_lost_rank()
            raise
        while not launched.event.reached(CHECK_INTERVAL_S):
            self.check()
        return launched

    def _name_lost_rank(self) -> None:
        """Raise EngineUnavailable naming the lost rank, if it becomes known within CHECK_INTERVAL_S. A collective may
        fail earlier, but its error tells only that a connection has ended."""
        deadline = time.monotonic() + CHECK_INTERVAL_S
        while time.monotonic() < deadline:
            self.check()
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the other ranks and close the socket."""
        if not self._context.closed:
            self.send(None)
            self._context.destroy(linger=LINGER_MS)

    def _bind(self, group: TPGroup) -> str:
        if sys.platform == "linux" and group.local_size == group.size:
            address = f"ipc://@manta-{uuid.uuid4().hex}"  # no file: Linux' abstract namespace
            self._socket.bind(address)
            return address
        port = self._socket.bind_to_random_port(f"tcp://{group.host}")
        return f"tcp://{group.host}:{port}"

    def _wait_for(self, missing: set[int]) -> None:
        size = len(missing) + 1
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while missing:
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                raise RendezvousTimeout(sorted(missing), size, JOIN_TIMEOUT_S, "plan broadcast")
            word, rank = self._receive()
            if word == HELLO and rank is not None:
                missing.discard(rank)

    def _receive(self) -> tuple[bytes, int | None]:
        """Return HELLO or GONE, and the rank; None as the rank for subscriptions to plans and for malformed
        messages."""
        message = self._socket.recv()
        word, topic = message[:1], message[1:]
        if topic.startswith(ANSWER):
            if word == HELLO:
                self._answers.append(msgspec.msgpack.decode(topic[len(ANSWER) :], type=tuple[int, Records])[1])
            return word, None
        found = TOPIC.fullmatch(topic)
        if found is not None and 0 < int(found[1]) < self._group.size:
            return word, int(found[1])
        if topic or word not in (HELLO, GONE):
            REFUSALS.add(NAME, "malformed", repr(message[:20]))
        return word, None


class PlanReceiver:
    """End of the broadcast at a rank above 0. Used by one thread at a time."""

    def __init__(self, group: TPGroup):
        self._rank = group.rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        _set_heartbeat(self._socket)
        if group.key is not None:
            group.key.guard_connector(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(PlanMessage).decode
        self._number = 0
        try:
            address = group.exchange("")[0]
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._socket.subscribe(b"")
        self._socket.subscribe(f"rank {self._rank}")
        self._socket.connect(address)

    def receive(self, timeout_s: float) -> PlanMessage | None:
        """Return the next message, or None if none arrives within `timeout_s`. Raises EngineUnavailable if rank 0 has
        gone or a message is missing."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if ready and self._socket.poll(0):  # a message that arrived just before rank 0 went still counts
            data = self._socket.recv()
            try:
                message = self._decode(data)
            except Exception as error:  # noqa: BLE001 - if it was a plan, the next one's number reveals the loss
                REFUSALS.add(NAME, "malformed", repr(error))
                return None
            self._number += 1
            if message.number != self._number:
                raise EngineUnavailable(
                    f"rank {self._rank} missed plan {self._number} and received plan {message.number}"
                )
            return message
        if ready:
            raise EngineUnavailable(f"rank 0 is gone, so rank {self._rank} ends")
        return None

    def answer(self, answer: PartRecord) -> None:
        """Send rank 0 an answer of the part that it names. This socket can send only subscriptions, so the answer is
        sent as the topic of one. The topic contains the rank, because equal topics of several ranks would be delivered
        only once."""
        topic = ANSWER + msgspec.msgpack.encode((self._rank, encoded(answer)))
        self._socket.subscribe(topic)
        self._socket.unsubscribe(topic)

    def close(self) -> None:
        self._context.destroy(linger=0)


def checksum(result: StepResult) -> int:
    return zlib.crc32(msgspec.msgpack.encode(result.tokens))


def _set_heartbeat(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
