"""Sends the results of steps from the last pipeline stage to rank 0, and how long each stage computed."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import zmq

from engine.distributed.sockets import PullSocket
from engine.parts.stages.rank.stage_group import StageGroup
from engine.wire.plan import StepResult

NAME = "results"  # name of the socket in metrics


class ResultReceiver:
    """Rank 0's end. Used by one thread."""

    def __init__(self, group: StageGroup):
        """Every rank has to create its end of the connection at the same time."""
        self._context = zmq.Context()
        self._socket: PullSocket[StepResult] = PullSocket(
            self._context, group.host, StepResult, name=NAME, key=group.key
        )
        self._found: deque[StepResult] = deque()
        self._last = group.stages - 1
        #: Seconds that each stage has computed; that of rank 0 stays 0.
        self.busy_s = [0.0] * group.stages
        group.exchange(self._socket.address)

    def arrived(self, step: int, timeout_s: float) -> bool:
        """Return whether the result of a step arrives within `timeout_s`. Results arrive in the order of steps."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._take_messages()
            if self._found and self._found[-1].step >= step:
                return True
            if not self._socket.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                return False

    def _take_messages(self) -> None:
        for result in self._socket.messages():
            self.busy_s[result.stage] = result.busy_s
            if result.stage == self._last:
                self._found.append(result)

    def take(self, step: int) -> StepResult:
        """Return the result of a step that has arrived."""
        result = self._found.popleft()
        assert result.step == step, f"step {step} was expected, and step {result.step} arrived"
        return result

    def close(self) -> None:
        self._context.destroy(linger=0)


class ResultSender:
    """The end of all ranks but rank 0. The first rank of each stage sends. Used by one thread."""

    def __init__(self, group: StageGroup):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if group.key is not None:
            group.key.guard_connector(self._socket)
        self._socket.connect(group.exchange("")[0])
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, result: StepResult) -> None:
        """Send a result without waiting."""
        self._socket.send(self._encode(result), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)
