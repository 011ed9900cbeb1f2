"""The servers that benchmarks.peers and benchmarks.agents compare over HTTP: `manta serve`, `vllm serve`, each with its
own defaults, and llama.cpp's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.peer_engines import LAST_ID
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.cli.bench.serve import measure
from cluster.terminal.progress import progress_bar
from tests.serve.serve_run import free_port, wait_until

if TYPE_CHECKING:
    from benchmarks.peers import Load

MODEL = "model"  # as which both serve it
START_S = 600.0  # vLLM compiles the model
REQUEST_S = 600.0
STOP_S = 60.0  # after which a server is killed
OTHER_SEED = 1000  # of the prompts that warm up
WAVES = 4  # requests of a repetition, in multiples of those under way


class Server:
    """A server by the command that a user would type, without any option that changes its speed. It runs only while it
    is measured, since each takes most of the memory by default."""

    def __init__(self, name: str, serve: list[str], environment: dict[str, str]):
        """serve: the command, up to the model. environment: beside this process's."""
        self.name, self._serve, self._environment = name, serve, environment

    def measure(self, load: Load, repetition: int) -> dict[str, float]:
        """Start the server, and keep the load's requests under way, twice: the first time warms up. The number of the
        repetition is the seed of the prompts."""
        with self.running() as url:
            self._run(url, load, OTHER_SEED + repetition)
            return self._run(url, load, repetition)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Start the server, and stop it in the end. Yields its address when it is up."""
        port = free_port()
        url, options = f"http://127.0.0.1:{port}", ["--served-model-name", MODEL, "--port", str(port)]
        with ExitStack() as running:
            process = subprocess.Popen([*self._serve, *options], env=os.environ | self._environment)
            running.callback(stop, process)
            wait_until(lambda: process.poll() is not None or is_up(url), START_S)
            if process.poll() is not None:
                raise SystemExit(f"{self.name} did not come up; its own error stands above")
            yield url

    def _run(self, url: str, load: Load, seed: int) -> dict[str, float]:
        sent = ServeLoad(
            num_prompts=WAVES * load.requests, max_concurrency=load.requests, input_len=load.input[0],
            output_len=load.output[0], vocab_size=LAST_ID, seed=seed,
        )  # fmt: skip
        report = asyncio.run(measure(sent, OpenAIClient(url, None, REQUEST_S), MODEL, {}, progress_bar()))
        gaps = report.latencies["itl"]
        if report.failed or gaps is None:
            raise SystemExit(f"{self.name}: {report.failed} requests failed: {report.errors}")
        return {"output": report.throughputs["output_throughput"], "p99": gaps.p99}


def manta_server(model: str) -> Server:
    return Server("manta", [sys.executable, "-m", "manta", "serve", model], {})


def vllm_server(model: str, python: str, environment: dict[str, str]) -> Server:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return Server("vllm", [python, "-m", "vllm.entrypoints.cli.main", "serve", model], environment | quiet)


def llamacpp_server(gguf: str, python: str) -> Server:
    return Server("llamacpp", [python, "-m", "benchmarks.llamacpp_server", gguf], {})


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
