"""The other ends of an EngineServer's sockets. Every wait is for a message; the limits only bound a failure."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from typing import Literal

import msgspec
import zmq

from engine.serving.server import EngineServer
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add
from engine.wire.part_record import PartRecord
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenBatch, TokenDelta

LIMIT_MS = 60_000
PORTS_PER_WORKER = 800
FIRST_PORT = 20_000 + PORTS_PER_WORKER * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 12_000
NEXT_PORT = itertools.cycle(range(FIRST_PORT, FIRST_PORT + PORTS_PER_WORKER))


def bind(socket: zmq.Socket) -> str:
    """Bind to a port that this process has not had lately, nor another worker of pytest, and return the address: a
    sender that outlives its receiver connects again, to whoever has the port next."""
    for port in itertools.islice(NEXT_PORT, PORTS_PER_WORKER):
        try:
            socket.bind(address := f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
        else:
            return address
    raise OSError(f"no free port from {FIRST_PORT} on")


class Inbox:
    """A PULL socket: an ingress' token channel, or the control actor's status channel."""

    def __init__(self, context: zmq.Context, message_type: object):
        self._socket = context.socket(zmq.PULL)
        self.address = bind(self._socket)
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def receive(self):
        assert self._socket.poll(LIMIT_MS), "no message came"
        return self._decode(self._socket.recv())

    def wait_for_message_or_end_of(self, thread: threading.Thread) -> None:
        while thread.is_alive() and not self._socket.poll(20):
            pass

    def is_empty(self) -> bool:
        return not self._socket.poll(0)


class ServerThread(threading.Thread):
    """Runs a server, and keeps the error that ended it."""

    def __init__(self, server: EngineServer):
        super().__init__(name="engine server")
        self.server = server
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.server.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, a test is about to report it
            self.error = error

    def stop(self) -> None:
        self.server.stop()
        self.join(LIMIT_MS / 1000)
        assert not self.is_alive(), "stop did not end run()"


class Ingress(Inbox):
    """Sends requests and gathers what comes back, until each has had its last delta."""

    def __init__(self, context: zmq.Context, server: EngineServer):
        super().__init__(context, TokenBatch)
        self._out = context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.LINGER, 0)
        self._out.connect(server.address)
        self.deltas: dict[str, list[TokenDelta]] = defaultdict(list)
        self.batches: list[TokenBatch] = []

    def send(self, message: object) -> None:
        self._out.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def add(
        self,
        name: str,
        prompt: list[int] | None = None,
        *records: PartRecord | None,
        timeout_s: float | None = None,
        prefill: Literal["auto", "local", "remote"] = "auto",
        num_prompt: int | None = None,
        when_idle: bool = False,
        **params,
    ) -> None:
        settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
        request = GenerateRequest(
            request_id=name,
            prompt=prompt or [5, 6, 7, 8],
            params=SamplingParams(**settings),
            reply_to=self.address,
            timeout_s=timeout_s,
            prefill=prefill,
            num_prompt=num_prompt,
            when_idle=when_idle,
        ).asking(*records)
        self.send(Add(request))

    def gather(self) -> None:
        """One batch."""
        batch = self.receive()
        self.batches.append(batch)
        for delta in batch.deltas:
            known = self.deltas[delta.request_id]
            assert not any(d.finish_reason for d in known), f"{delta.request_id} went on after its last delta"
            known.append(delta)

    def last(self, name: str) -> TokenDelta:
        while not (self.deltas[name] and self.deltas[name][-1].finish_reason):
            self.gather()
        return self.deltas[name][-1]

    def tokens(self, name: str) -> list[int]:
        self.last(name)
        return [token for delta in self.deltas[name] for token in delta.token_ids]
