"""The servers that benchmarks.peers compares over HTTP: `manta serve` and `vllm serve`, each with its own defaults."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.peer_engines import CONTEXT, KV_GIB, LAST_ID
from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.cli.bench.progress import progress_bar
from cluster.cli.bench.serve import measure
from tests.serve.serve_run import ServeRun, free_port, wait_until

if TYPE_CHECKING:
    from benchmarks.peers import Load

MODEL = "model"  # as which both serve it
START_S = 600.0  # vLLM compiles the model
REQUEST_S = 600.0
STOP_S = 60.0  # after which a server is killed
WAVES = 4  # requests of a repetition, in multiples of those under way


class Server:
    """A server that has started."""

    name: str
    url: str

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


class MantaServer(Server):
    name = "manta"

    def __init__(self, model: str, running: ExitStack):
        """running: ends the server."""
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="peers", dir="/tmp")))
        engine = {"dtype": "bfloat16", "max_model_len": CONTEXT, "kv_cache_memory_bytes": KV_GIB * 2**30}
        args: dict[str, Any] = {"models": [{"name": MODEL, "model": str(Path(model).absolute()), "engine": engine}]}
        server = ServeRun(folder, args, manta=True)
        running.callback(server.stop)
        self.url = server.url
        server.wait_until_healthy()


class VllmServer(Server):
    name = "vllm"

    def __init__(self, model: str, python: str, environment: dict[str, str], running: ExitStack):
        """running: ends the server."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        ours = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }  # fmt: skip
        process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", MODEL,
             "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT),
             "--uvicorn-log-level", "warning"],
            env=os.environ | environment | ours,
        )  # fmt: skip
        running.callback(stop, process)
        wait_until(lambda: process.poll() is not None or is_up(self.url), START_S)
        if process.poll() is not None:
            raise SystemExit("vllm serve did not come up; its own error stands above")


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
