"""Engines in processes and on cores of their own, without Ray: pools of one engine each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import get_args

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.wire.messages import Command, EngineStatus, Notice, kinds_of
from engine.wire.parts.handoffs import (
    CancelDispatch,
    CancelPrefill,
    DispatchRemote,
    Prefill,
    PrefillReplica,
    PrefillReplicas,
)
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.stats.handoff_stats import PeerPool

START_TIMEOUT_S = 300.0
POLL_MS = 100
STOP_TIMEOUT_S = 10.0


class EngineProcess:
    """One engine, with as many threads as cores."""

    def __init__(self, context: zmq.Context, config: EngineConfig, cores: Sequence[int], *, name: str):
        self.name = name
        self.notices = context.socket(zmq.PULL)
        port = self.notices.bind_to_random_port("tcp://127.0.0.1")
        spawn = multiprocessing.get_context("spawn")  # a fork would share the parent's threads' locks
        self._ready, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(config, name, list(cores), f"tcp://127.0.0.1:{port}", theirs), name=name, daemon=True
        )
        self._process.start()
        theirs.close()
        self.commands = context.socket(zmq.PUSH)

    def connect(self) -> None:
        """Wait until the model is loaded. Raises EngineUnavailable."""
        if not self._ready.poll(START_TIMEOUT_S):
            raise EngineUnavailable(f"engine {self.name!r} was not ready within {START_TIMEOUT_S:.0f} s")
        try:
            self.address: str = self._ready.recv()
            self.commands.connect(self.address)
        except EOFError:
            raise EngineUnavailable(f"engine {self.name!r} could not start") from None

    def send(self, command: Command) -> None:
        self.commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(STOP_TIMEOUT_S)


def _serve(config: EngineConfig, name: str, cores: list[int], status_to: str, ready: Connection) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    import torch

    from engine.serving.server import EngineServer

    torch.set_num_threads(len(cores))
    server = EngineServer(config, engine_id=name, status_to=status_to)
    ready.send(server.address)
    server.run()


class Engines:
    """Engines by name, with a thread in place of their control actors: it brings what `decode` wants computed elsewhere
    to `prefill`, and its images to `encode`. A context manager."""

    def __init__(self, configs: dict[str, tuple[EngineConfig, Sequence[int]]]):
        """Start the engines. configs: configuration and cores of each, by name. Raises EngineUnavailable."""
        self._context = zmq.Context()
        self._engines = {name: EngineProcess(self._context, *config, name=name) for name, config in configs.items()}
        self._statuses: dict[str, EngineStatus] = {}
        self._closing = threading.Event()
        self._control = threading.Thread(target=self._run, name="control", daemon=True)
        try:
            for engine in self._engines.values():
                engine.connect()
        except EngineUnavailable:
            self._stop()
            raise
        self._control.start()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._control.join()
        self._stop()

    def __getitem__(self, name: str) -> EngineProcess:
        return self._engines[name]

    def stats(self, name: str) -> EngineStats:
        """Return the newest statistics of an engine, at most a second old."""
        return self._statuses[name].stats

    def _stop(self) -> None:
        for engine in self._engines.values():
            engine.stop()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        decode = msgspec.msgpack.Decoder(kinds_of(Notice)).decode
        poller = zmq.Poller()
        for engine in self._engines.values():
            poller.register(engine.notices, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            for engine in self._engines.values():
                if engine.notices in ready:
                    self._handle(engine, decode(engine.notices.recv()))

    def _handle(self, engine: EngineProcess, notice: Notice) -> None:
        peers = {pool: self._engines[pool] for pool in get_args(PeerPool) if pool in self._engines}
        match notice:
            case EngineStatus():
                self._statuses[engine.name] = notice
                for pool, peer in peers.items():
                    if engine is peer:
                        self._engines["decode"].send(PrefillReplicas([PrefillReplica.of(notice)], pool))
            case DispatchRemote(remote_request, pool):
                peers[pool].send(Prefill(remote_request))
            case CancelDispatch(handoff_id):
                for peer in peers.values():
                    peer.send(CancelPrefill(handoff_id))
