"""Runs the ranks above 0, which compute their shards of the model as rank 0 plans."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from engine.distributed.plan_broadcast import PlanMessage, PlanReceiver, checksum
from engine.distributed.tp_group import TPGroup
from engine.errors import EngineUnavailable
from engine.runner.launcher import Launcher
from engine.runner.model_runner import ModelRunner
from engine.runner.step import LaunchedStep, StepInputs

logger = logging.getLogger(__name__)

LOADING_POLL_S = 0.005  # while a part is busy with a command
POLL_INTERVAL_S = 0.2  # how soon a thread notices that it should end


class Worker:
    """One rank above 0, which follows rank 0."""

    def __init__(self, group: TPGroup, runner: ModelRunner, launcher: Launcher, receiver: PlanReceiver):
        """All of them are closed when `run` ends."""
        self._group, self._runner, self._launcher, self._receiver = group, runner, launcher, receiver
        self._stopping = threading.Event()

    def run(self) -> None:
        """Compute the plans of rank 0 until it ends the group. Raises EngineUnavailable if any rank dies, or samples
        other tokens than rank 0."""
        sampled: dict[int, int] = {}  # step -> checksum, until rank 0 has sent its own
        launched: deque[LaunchedStep | Future[LaunchedStep]] = deque()
        runner = self._runner
        try:
            for message, inputs in self._ahead() if self._runner.overlap else self._prepared():
                step = message.checked
                if sampled.get(step, message.checksum) != message.checksum:
                    raise EngineUnavailable(f"rank {self._group.rank} sampled other tokens than rank 0 in step {step}")
                sampled = {later: value for later, value in sampled.items() if later > step}
                launched.append(self._launcher.launch(inputs))
                if len(launched) > runner.launches_ahead:  # like rank 0
                    oldest = launched.popleft()
                    result = runner.collect(oldest.result() if isinstance(oldest, Future) else oldest)
                    if runner.samples:
                        sampled[result.step] = checksum(result)
        finally:
            self._stopping.set()
            self._launcher.close()
            runner.close()
            self._group.close()
        logger.info("rank ended rank=%d", self._group.rank)

    def stop(self) -> None:
        """Make `run` return. May be called from any thread."""
        self._stopping.set()

    def _prepared(self) -> Iterator[tuple[PlanMessage, StepInputs]]:
        """Yield every plan with its inputs, until rank 0 ends the group or `stop` is called."""
        parts = self._runner.parts
        try:
            while not self._stopping.is_set():
                message = self._receiver.receive(LOADING_POLL_S if parts.busy else POLL_INTERVAL_S)
                for answers in parts.answers:
                    for answer in answers():
                        self._receiver.answer(answer)
                if message is None:
                    continue
                for name, command in message.command.items():
                    parts.obey[name](command)
                if message.plan is not None:
                    yield message, self._runner.prepare(message.plan, message.sampled)
                elif not message.command:
                    return
        finally:
            self._receiver.close()

    def _ahead(self) -> Iterator[tuple[PlanMessage, StepInputs]]:
        """Yield the items of `_prepared`, which runs in a separate thread, so that a step is prepared while the one
        before it computes."""
        ready: queue.SimpleQueue[tuple[PlanMessage, StepInputs] | BaseException | None] = queue.SimpleQueue()

        def receive() -> None:
            try:
                self._runner.device.set_current()
                for item in self._prepared():
                    ready.put(item)
                ready.put(None)
            except BaseException as error:  # noqa: BLE001 - raised again in `run`
                ready.put(error)
                self._group.abort(str(error))  # `run` may be waiting for a rank that is gone

        threading.Thread(target=receive, name="plans", daemon=True).start()
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
