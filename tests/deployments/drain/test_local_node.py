"""What /proc says of a node, and what happens to a replica's parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.drain.local_node import LocalNode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")


def process(proc: Path, pid: int, title: bytes, parent: int) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(title)
    (proc / str(pid) / "stat").write_text(f"{pid} (ray: a) b) S {parent} 1 1 0 -1")


def test_replicas_of_a_node_are_those_with_the_same_raylet(tmp_path):
    process(tmp_path, 7, b"ray::ServeReplica:manta:ingress\0", os.getppid())
    process(tmp_path, 8, b"ray::ServeReplica:manta:decode-m.generate\0", os.getppid())
    process(tmp_path, 9, b"ray::ServeReplica:manta:decode-m\0", os.getppid() + 1)  # of another node on this machine
    process(tmp_path, 10, b"ray::RankActor.run\0", os.getppid())
    (tmp_path / "11").mkdir()  # has just ended
    assert LocalNode(8000, tmp_path).replicas() == {7, 8}


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_clients_are_connections_to_the_port_of_the_proxy(family, host):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host}")
    with server:
        port = server.getsockname()[1]
        assert not LocalNode(port).has_clients()
        with socket.create_connection((host, port)):
            assert LocalNode(port).has_clients()


def test_the_end_of_a_node_is_that_of_the_replicas_parent():
    replica = "import sys; from deployments.drain.local_node import LocalNode; LocalNode(0).end()"
    raylet = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {replica!r}]); sys.exit(0)"
    done = subprocess.run([sys.executable, "-c", raylet], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
