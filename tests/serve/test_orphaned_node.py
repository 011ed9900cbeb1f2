"""A worker whose head goes first, as when Kubernetes deletes a RayService: it ends as soon as no stream runs.

Without that, Ray would wait for the GCS for RECONNECT_S. Both nodes are `ray start --block`, as in pods.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from deployments.drain.orphaned_node import GONE_S, VARIABLE
from tests.models import make_model
from tests.serve.pod_environment import pod_environment
from tests.serve.serve_run import Program, ServeRun, free_port, kill_all, ray_environment, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

RECONNECT_S = 600  # what KubeRay sets where the control store is in Redis
RAY = str(Path(sys.executable).with_name("ray"))
ENDS_S = 60.0


class Node(Program):
    """A node of Ray."""

    def __init__(self, log: Path, environment: dict[str, str], *arguments: str):
        self._log = log
        with log.open("w") as output:
            command = [RAY, "start", "--block", "--disable-usage-stats", *arguments]
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        wait_until(lambda: "Ray runtime started" in self.said())

    def said(self) -> str:
        return self._log.read_text()

    def replica(self, deployment: str) -> psutil.Process:
        title = f"ray::ServeReplica:manta:{deployment}"
        (found,) = [p for p in self.processes() if p.cmdline()[:1] and p.cmdline()[0].startswith(title)]
        return found

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> None:
        if self.process.poll() is None:
            kill_all(self.processes())


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as name:  # socket paths must be short
        yield Path(name)


def own_url(ingress: psutil.Process) -> str:
    """The address on which an ingress takes what HAProxy sends it."""
    for connection in ingress.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            url = f"http://127.0.0.1:{connection.laddr.port}"
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                    return url
    raise AssertionError("the ingress does not listen")


def test_worker_that_lost_its_head_ends_with_its_last_stream(tmp_path, folder):
    model = make_model(tmp_path, "llama", tokenizer=True, max_position_embeddings=100_000)
    drain = folder / "drain"
    environment = ray_environment(str(folder)) | pod_environment(folder) | {VARIABLE: str(drain)}
    environment |= {"RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S)}
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    short = {**environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "10"}  # as in k8s/base
    head_arguments = (
        "--head",
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=0",
        "--include-dashboard=false",
    )
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 8192}
    args = {"models": [{"name": "m", "model": str(model), "engine": engine, "decode": {"num_cpus": 0.7}}]}
    with (
        Node(tmp_path / "head.log", short, *head_arguments) as head,
        Node(
            tmp_path / "worker.log", environment, f"--address={address}", "--node-ip-address=127.0.0.1", "--num-cpus=2"
        ) as worker,
        ServeRun(tmp_path, args, address=address, environment=environment) as server,
    ):
        server.wait_until_healthy()
        url = own_url(worker.replica("ingress"))
        body = {"model": "m", "prompt": "a", "max_tokens": 90_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            drain.mkdir()  # as the preStop hook does
            for node in (worker, head):
                node.process.send_signal(signal.SIGTERM)
            head.process.wait(ENDS_S)
            alone_since = time.monotonic()
            for _ in lines:
                if time.monotonic() > alone_since + GONE_S + 5:
                    break
            else:
                raise AssertionError("the stream was cut")
            assert worker.process.poll() is None
        worker.process.wait(ENDS_S)
        assert "Local node finished draining" in worker.said()
