"""An engine in a process of its own, which a test can stop, kill, and let make a few steps only."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

import engine.serving.server
from engine.config import EngineConfig
from engine.kv_transfer import channel
from engine.kv_transfer.transport import worker as kv_worker
from engine.kv_transfer.transport.tcp import TcpTransport
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.runner.model_runner import ModelRunner
from engine.serving.server import EngineServer
from engine.wire.remote_request import Peer
from tests.engine_processes import with_engine
from tests.processes import outlives_test

STATUS_PERIOD_S = 0.05
ANSWER_S = 60.0


class EngineProcess:
    """Imports what it needs as soon as it is there; an engine after `start`.

    What comes through `pipe`: ("control", address) and ("data", description), to be answered with the address and the
    description that others are to use; then ("ready", address for commands); then an answer to each `check`.
    """

    def __init__(self) -> None:
        context = with_engine()
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there,), daemon=True)
        self._process.start()
        outlives_test.add(self._process.pid)
        there.close()

    def start(self, config: EngineConfig, engine_id: str, status_to: str) -> None:
        self.pipe.send((config, engine_id, status_to))

    def pace(self, steps: int | None) -> None:
        """Let the engine make so many steps more, and then wait inside the next one. None: as many as it likes."""
        self.pipe.send(("pace", steps))

    def check(self) -> None:
        """The scheduler's books must balance. The engine must have nothing to do."""
        self.pipe.send(("check", None))
        assert self.pipe.poll(ANSWER_S), "no answer"
        what, problem = self.pipe.recv()
        assert (what, problem) == ("checked", "")

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


# -- in the child ------------------------------------------------------------------------------------------


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: int | None = None

    def pace(self, steps: int | None) -> None:
        with self._changed:
            self._steps = steps
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._steps != 0)
            if self._steps is not None:
                self._steps -= 1


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    config, engine_id, status_to = pipe.recv()
    gate = Gate()
    be_reached_over_links(pipe)
    compute = ModelRunner.launch

    def launch(self: ModelRunner, inputs: Any) -> Any:
        gate.pass_through()
        return compute(self, inputs)

    ModelRunner.launch = launch  # type: ignore[method-assign]
    engine.serving.endpoint.STATUS_PERIOD_S = STATUS_PERIOD_S
    # else one fetch for which the machine stood still would be learned, and later tests would compute instead
    KVFetching._pays = lambda *_: True  # type: ignore[method-assign]
    server = EngineServer(config, engine_id=engine_id, status_to=status_to)
    pipe.send(("ready", server.address))
    threading.Thread(target=obey, args=(pipe, gate, server), daemon=True).start()
    server.run()


def be_reached_over_links(pipe: Connection) -> None:
    """Let the parent say how others reach this engine. Of all that it sends only this differs."""

    def ask(what: str, own: Any) -> Any:
        pipe.send((what, own))
        return pipe.recv()

    class LinkedTransport(TcpTransport):
        def describe(self) -> bytes:
            described: bytes = ask("data", super().describe())
            return described

    def linked_peer(engine_id: str, address: str, epoch: int) -> Peer:
        return Peer(engine_id, ask("control", address), epoch)

    kv_worker.TcpTransport = LinkedTransport  # type: ignore[misc]
    channel.Peer = linked_peer  # type: ignore[assignment,misc]


def obey(pipe: Connection, gate: Gate, server: EngineServer) -> None:
    while True:
        try:
            what, value = pipe.recv()
        except EOFError:  # the test has ended
            os._exit(0)
        if what == "pace":
            gate.pace(value)
            continue
        try:
            server._core.scheduler.check()
        except AssertionError as error:
            pipe.send(("checked", repr(error)))
        else:
            pipe.send(("checked", ""))
