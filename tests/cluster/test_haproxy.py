"""What `manta-haproxy` makes of Ray's configurations, by Ray's own HAProxy. Without Ray."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster import haproxy
from tests.serve.serve_run import free_port, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


@contextmanager
def running(applications: dict[str, BackendConfig]) -> Iterator[str]:
    """As Ray starts it for applications that have no replica yet, by name. Its address."""
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
        process = subprocess.Popen([program, "-db", "-f", api.config_file_path], stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: (Path(folder) / "admin.sock").exists())
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def test_haproxy_that_knows_no_application_yet_asks_clients_to_try_again():
    with running({}) as url:
        answer = httpx.post(f"{url}/v1/completions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_haproxy_that_knows_an_application_answers_404_to_other_paths():
    with running({"a": BackendConfig(name="http-a", path_prefix="/a", app_name="a")}) as url:
        assert httpx.get(f"{url}/b").status_code == 404
