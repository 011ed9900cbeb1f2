"""What `manta-haproxy` makes of Ray's configurations, by Ray's own HAProxy. Without Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster import haproxy
from tests.serve.serve_run import free_port, wait_until

STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:])"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


@contextmanager
def running(applications: dict[str, BackendConfig]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """As Ray starts it for applications that have no replica yet, by name. Its address, and the process that did."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # socket paths must be short
        config = HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=port),
            grpc_options=gRPCOptions(),
            is_head=True,
            metrics_port=free_port(),
            stats_port=free_port(),
            socket_path=f"{folder}/admin.sock",
            metrics_socket_path=f"{folder}/metrics.sock",
            server_state_base=folder,
            server_state_file=f"{folder}/server-state",
        )
        api = HAProxyApi(config, applications, f"{folder}/haproxy.cfg")
        api._generate_config_file_internal()
        program = haproxy.environment()[haproxy.BINARY_PATH]
        command = [sys.executable, "-c", STARTER, program, "-db", "-f", api.config_file_path]
        starter = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: (Path(folder) / "admin.sock").exists())
            proxies = psutil.Process(starter.pid).children()
            yield f"http://127.0.0.1:{port}", starter
        finally:
            starter.kill()
            starter.wait()
            gone, alive = psutil.wait_procs(proxies, timeout=20)
            assert gone and not alive, "HAProxy ends with the process that started it"


def test_haproxy_that_knows_no_application_yet_asks_clients_to_try_again():
    with running({}) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_haproxy_that_knows_an_application_answers_404_to_other_paths():
    with running({"a": BackendConfig(name="http-a", path_prefix="/a", app_name="a")}) as (url, _):
        assert httpx.get(f"{url}/b").status_code == 404


def test_haproxy_whose_manager_is_killed_lets_go_of_its_port_and_finishes_what_it_has():
    with running({}) as (url, starter), socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as early:
        early.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n")
        starter.kill()
        wait_until(lambda: not connects(url))
        early.sendall(b"\r\n{}")
        assert early.recv(100).startswith(b"HTTP/1.1 503")


def connects(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", httpx.URL(url).port)).close()
    except ConnectionRefusedError:
        return False
    return True
