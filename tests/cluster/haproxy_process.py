"""Ray's HAProxy as a process of its own, without Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster import haproxy
from cluster.ray_environment import environment as ray_environment
from tests.serve.serve_run import free_port, wait_until

STARTER = "import subprocess, sys; subprocess.run(sys.argv[1:])"

needs_haproxy = pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only")


def rendered(
    applications: dict[str, BackendConfig],
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 1,
    metrics_port: int = 1,
    timeout_client_s: int = 60,
) -> Path:
    """Write the configuration that Ray has for applications, by name, into a folder. Return the file."""
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        grpc_options=gRPCOptions(),
        is_head=True,
        metrics_port=metrics_port,
        stats_port=free_port(),
        socket_path=f"{folder}/admin.sock",
        metrics_socket_path=f"{folder}/metrics.sock",
        server_state_base=str(folder),
        server_state_file=f"{folder}/server-state",
        timeout_client_s=timeout_client_s,
    )
    api = HAProxyApi(config, applications, f"{folder}/haproxy.cfg")
    api._generate_config_file_internal()
    return Path(api.config_file_path)


@contextmanager
def replaceable(
    first: dict[str, BackendConfig], second: dict[str, BackendConfig], environment: dict[str, str] | None = None
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Run HAProxy for the first applications. Yields its port, and what replaces it, as Ray does when an application
    changes, by one for the second applications."""
    port, metrics_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder, ExitStack() as stack:

        def start(applications: dict[str, BackendConfig], *more: str) -> subprocess.Popen[bytes]:
            config = rendered(applications, Path(folder), port=port, metrics_port=metrics_port)
            command = [ray_environment()[haproxy.BINARY_PATH], "-db", "-f", str(config), *more]
            process = subprocess.Popen(command, env=os.environ | (environment or {}), stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until(lambda: answers(folder, process.pid))
            return process

        old = start(first)
        yield port, lambda: start(second, "-sf", str(old.pid), "-x", f"{folder}/admin.sock")


def answers(folder: str, pid: int) -> bool:
    """Whether it is the process that answers at the admin socket."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
        admin.connect(f"{folder}/admin.sock")
        admin.sendall(b"show info\n")
        return f"\nPid: {pid}\n".encode() in b"".join(iter(lambda: admin.recv(10_000), b""))
    return False


@contextmanager
def running(
    applications: dict[str, BackendConfig],
    host: str = "127.0.0.1",
    environment: dict[str, str] | None = None,
    timeout_client_s: int = 60,
) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """Run HAProxy as Ray starts it for applications (by name) that have no replica yet.

    Yields its address, that of its metrics, and the process that started it. environment: further variables.
    timeout_client_s: for which a client may send nothing.
    """
    port, metrics_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # socket paths must be short
        config = rendered(applications, Path(folder), host, port, metrics_port, timeout_client_s)
        program = ray_environment()[haproxy.BINARY_PATH]
        env = os.environ | (environment or {})
        command = [sys.executable, "-c", STARTER, program, "-db", "-f", str(config)]
        starter, proxies = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env), list[psutil.Process]()
        try:
            wait_until(lambda: (Path(folder) / "admin.sock").exists())
            proxies = psutil.Process(starter.pid).children()
            yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", starter
        finally:
            starter.kill()
            starter.wait()
            wait_until(lambda: not any(map(lives, proxies)), timeout_s=20)  # it ends with the process that started it


def lives(process: psutil.Process) -> bool:
    """Whether it computes. What has ended may stay a zombie for seconds: its parent is gone, and init in no hurry."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
