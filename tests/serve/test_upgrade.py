"""From the wheel of the commit before to that of this tree, under load: no request fails.

As KubeRay does it, and whoever has two machines: the new version is a server of its own, which new connections go to
once it answers, and the old one then ends the requests that it has. `pytest -s` prints what it took.
"""

from __future__ import annotations

import io
import selectors
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.chaos_load import run_load
from tests.serve.chaos_streams import run_streams
from tests.serve.installed import Installed, build_wheel
from tests.serve.serve_run import ServeRun

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
REQUESTS = 600
GREEDY = {"model": "pocket", "temperature": 0, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    *({"prompt": f"The {word} is", "max_tokens": 8, **GREEDY} for word in ("ocean", "lamp", "winter", "dog", "music")),
    {"prompt": "A river was", "max_tokens": 400, **GREEDY},
]


class Service:
    """A TCP port whose new connections go to `port`, as those of a Kubernetes Service do; older ones stay."""

    def __init__(self, port: int):
        self.port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=_relay, args=(client, self.port), daemon=True).start()


def _relay(client: socket.socket, port: int) -> None:
    with client, socket.create_connection(("127.0.0.1", port)) as server, selectors.DefaultSelector() as ready:
        other = {client: server, server: client}
        for end in other:
            ready.register(end, selectors.EVENT_READ)
        with suppress(OSError):
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(65536)
                    if not data:
                        return
                    other[key.fileobj].sendall(data)


@pytest.fixture
def versions(tmp_path) -> list[Installed]:
    """The commit before, and this tree."""
    archive = subprocess.run(["git", "archive", "HEAD^"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tmp_path / "before")
    wheels = [build_wheel(tree, tmp_path / f"wheel{i}") for i, tree in enumerate((tmp_path / "before", ROOT))]
    return [Installed(wheel, tmp_path / f"installed{i}", writable=True) for i, wheel in enumerate(wheels)]


@pytest.fixture
def servers(versions, tmp_path) -> Iterator[list[ServeRun]]:
    """The old one runs; the new one is started by the test."""
    running: list[ServeRun] = []
    try:
        running.append(start(versions[0], tmp_path / "old"))
        yield running
    finally:
        for server in running:
            server.stop()


def start(version: Installed, folder: Path) -> ServeRun:
    folder.mkdir()
    model = {"name": "pocket", "model": "pocket", "engine": {"dtype": "float32", "num_threads": 1}}
    server = ServeRun(folder, {"models": [{**model, "decode": {"num_cpus": 0.4}}]}, installed=version)
    server.wait_until_healthy()
    return server


def test_no_request_fails_while_the_next_version_takes_over(servers, versions, tmp_path):
    (old,) = servers
    service = Service(old.port)
    expected = run_streams(service.url, BODIES)
    assert not expected.problems

    def upgrade() -> None:
        servers.append(start(versions[1], tmp_path / "new"))
        service.port = servers[1].port
        old.terminate()
        assert old.wait(timeout_s=300) == 0

    found = run_load(service.url, BODIES, REQUESTS, upgrade, reconnect=True)
    service.close()
    print(f"\n| {len(found.answers)} requests | {len(found.problems)} failed | slowest {found.slowest_s:.1f} s "
          f"| upgrade {found.change_s:.0f} s |")  # fmt: skip
    assert not found.problems
    assert [found.texts(i) for i in range(len(BODIES))] == [{text} for text in expected.texts]
