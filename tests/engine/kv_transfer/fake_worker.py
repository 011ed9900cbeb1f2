"""A KV worker as a channel sees it: a PULL socket for commands, and one answer to each read. Its memory is a dict, and
it holds reads back when told to."""

from __future__ import annotations

import threading
from typing import ClassVar

import msgspec
import zmq

from engine.kv_transfer.protocol.messages import Attach, KVWorkerCommand, Read, ReadEnded, StopRead


class FakeKVWorker:
    """rank: of its engine. holding: start no reads. mute: never say that a read has stopped."""

    everyone: ClassVar[dict[bytes, FakeKVWorker]] = {}  # by description

    def __init__(self, rank: int = 0, holding: bool = False, mute: bool = False):
        self.rank, self.mute = rank, mute
        self.go_on = threading.Event()
        if not holding:
            self.go_on.set()
        self.has_read = threading.Event()  # a command to read has come
        self.memory: dict[int, object] = {}
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        port = self._commands.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.description = {"fake": self.address.encode()}
        self.everyone[self.address.encode()] = self
        self._waiting: list[Read] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        del self.everyone[self.address.encode()]

    def _run(self) -> None:
        decode = msgspec.msgpack.Decoder(KVWorkerCommand).decode
        while not self._closing.is_set():
            if self._commands.poll(10):
                command = decode(self._commands.recv())
                if isinstance(command, Attach):
                    self._answers = self._context.socket(zmq.PUSH)
                    self._answers.connect(command.reply_to)
                elif isinstance(command, Read):
                    self._waiting.append(command)
                    self.has_read.set()
                elif isinstance(command, StopRead) and not self.mute:
                    for read in [r for r in self._waiting if r.read_id == command.read_id]:
                        self._waiting.remove(read)
                        self._answer(read, "stopped")
            while self._waiting and self.go_on.is_set():
                self._read(self._waiting.pop(0))

    def _read(self, read: Read) -> None:
        source = self.everyone.get(read.ranks[0]["fake"])
        if source is None:
            self._answer(read, "connection lost")
            return
        for remote, local in zip(read.source_blocks, read.local_blocks, strict=True):
            self.memory[local] = source.memory[remote]
        self._answer(read, None)

    def _answer(self, read: Read, error: str | None) -> None:
        num_bytes = 0 if error else len(read.source_blocks)
        self._answers.send(msgspec.msgpack.encode(ReadEnded(read.read_id, self.rank, "fake", num_bytes, 0.0, error)))
