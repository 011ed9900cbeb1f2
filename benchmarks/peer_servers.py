"""The servers that benchmarks.peers compares over HTTP: `manta serve` and `vllm serve`, each with its own defaults."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.peer_engines import LAST_ID
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.cli.bench.progress import progress_bar
from cluster.cli.bench.serve import measure
from tests.serve.serve_run import free_port, wait_until

if TYPE_CHECKING:
    from benchmarks.peers import Load

MODEL = "model"  # as which both serve it
START_S = 600.0  # vLLM compiles the model
REQUEST_S = 600.0
STOP_S = 60.0  # after which a server is killed
WAVES = 4  # requests of a repetition, in multiples of those under way


class Server:
    """A server that has started by the command that a user would type, without any option that changes its speed."""

    def __init__(self, name: str, serve: list[str], environment: dict[str, str], running: ExitStack):
        """serve: the command, up to the model. environment: beside this process's. running: ends the server."""
        port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            [*serve, "--served-model-name", MODEL, "--port", str(port)], env=os.environ | environment
        )
        running.callback(stop, process)
        wait_until(lambda: process.poll() is not None or is_up(self.url), START_S)
        if process.poll() is not None:
            raise SystemExit(f"{name} did not come up; its own error stands above")

    def measure(self, load: Load, repetition: int) -> dict[str, float]:
        """Keep the load's requests under way all the time; the number of the repetition is the seed of the prompts."""
        sent = ServeLoad(
            num_prompts=WAVES * load.requests, max_concurrency=load.requests, input_len=load.input[0],
            output_len=load.output[0], vocab_size=LAST_ID, seed=repetition,
        )  # fmt: skip
        report = asyncio.run(measure(sent, OpenAIClient(self.url, None, REQUEST_S), MODEL, {}, progress_bar()))
        gaps = report.latencies["itl"]
        if report.failed or gaps is None:
            raise SystemExit(f"{self.name}: {report.failed} requests failed: {report.errors}")
        return {"output": report.throughputs["output_throughput"], "p99": gaps.p99}


def manta_server(model: str, running: ExitStack) -> Server:
    return Server("manta", [sys.executable, "-m", "manta", "serve", model], {}, running)


def vllm_server(model: str, python: str, environment: dict[str, str], running: ExitStack) -> Server:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return Server("vllm", [python, "-m", "vllm.entrypoints.cli.main", "serve", model], environment | quiet, running)


def stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
