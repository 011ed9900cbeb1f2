"""Both pools of a model on a cluster of several nodes: they grow under load, shrink after it, sleep, and wake.

One cluster and one `serve run`, so the order of the tests matters. `pytest -s` shows what each change took.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from tests.models import make_model
from tests.scrape import Scrape
from tests.serve.fake_cluster import FakeCluster
from tests.serve.serve_run import ServeRun, free_port, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

POOL = {"pool": "engines"}
SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 4.0,
    "scale_to_zero_delay_s": 8.0,
    "num_cpus": 0.8,  # a node has room for two replicas
    "label_selector": POOL,
}
SLOTS = 4
MODEL = {
    "name": "m",
    "engine": {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 2048},
    "prefill": SCALING,
    "decode": {**SCALING, "engine": {"max_num_seqs": SLOTS}},
    "handoff": {"transport": "tcp", "policy": "always"},
    "slo": {"ttft_ms": 20, "itl_ms": 1000},  # a prompt of PROMPT_TOKENS takes longer than the first
}
PROMPT_TOKENS = 3000
CLIENTS = 3 * SLOTS
CHANGED_S = 100.0
STARTED = re.compile(r"((?:decode|prefill)-m-\w+)/rank0 placement\.rank_actor rank starts pid=\d+ node=(\w+)")


class Serving:
    def __init__(self, server: ServeRun, ray_metrics: str):
        self.server, self.prompts = server, 0
        self._ray_metrics = ray_metrics

    def ask(self, max_tokens: int = 20) -> httpx.Response:
        """With a prompt that no cache has."""
        self.prompts += 1
        prompt = [3 + (self.prompts * 7 + i * i) % 90 for i in range(PROMPT_TOKENS)]
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)

    def engines(self, pool: str) -> set[str]:
        """Names of its engines that are up."""
        scrape = Scrape(httpx.get(f"{self.server.url}/metrics", timeout=60).text)
        found = {one.labels["engine"] for one in scrape.select("vllm:num_requests_running", [])}
        return {name for name in found if name.startswith(pool)}

    def nodes(self, engines: set[str]) -> set[str]:
        started = [match for line in list(self.server.log) if (match := STARTED.search(line))]
        return {match[2] for match in started if match[1] in engines}

    def wait_for(self, what: str, **engines: set[int]) -> None:
        """engines: how many there may be of each pool."""
        began = time.monotonic()
        wait_until(lambda: all(len(self.engines(pool)) in numbers for pool, numbers in engines.items()), CHANGED_S)
        print(f"{what}: {time.monotonic() - began:.1f} s")

    def decisions(self, pool: str) -> list[tuple[int, int, str]]:
        """(from, to, reason), as logged."""
        pattern = re.compile(rf"autoscaling {pool}-m from (\d+) to (\d+) replicas: reason=(\w+) ")
        found = [match for line in list(self.server.log) if (match := pattern.search(line))]
        return [(int(match[1]), int(match[2]), match[3]) for match in found]

    def exported(self, name: str, **labels: str) -> float:
        """The value of a series that Ray exports for Serve's controller."""
        return Scrape(httpx.get(self._ray_metrics, timeout=60).text).sum(f"ray_manta_autoscaling_{name}", **labels)

    def health(self) -> int:
        return httpx.get(f"{self.server.url}/health", timeout=60).status_code


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[Serving]:
    folder = make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, max_position_embeddings=4096)
    metrics_port = free_port()
    workers = [{"num_cpus": 2, "labels": POOL}] * 2
    with FakeCluster([{"num_cpus": 1, "metrics_export_port": metrics_port}, *workers]) as cluster:
        args: dict[str, Any] = {"models": [{**MODEL, "model": str(folder)}]}
        server = ServeRun(tmp_path_factory.mktemp("serve"), args, address=cluster.address)
        try:
            server.wait_for_line("replica ready", timeout_s=120)
            server.wait_for_line("replica ready", timeout_s=120)
            yield Serving(server, f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            (folder.parent / "serve.log").write_text("".join(server.log))
            server.stop()


def test_both_pools_grow_under_load_and_shrink_after_it_and_no_request_fails(serving):
    serving.wait_for("start", decode={1}, prefill={1})
    over = Event()

    def client() -> list[int]:
        statuses = []
        while not over.is_set():
            statuses.append(serving.ask().status_code)
        return statuses

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            serving.wait_for("both pools twice as large", decode={2}, prefill={2})
            assert len(serving.nodes(serving.engines("decode") | serving.engines("prefill"))) == 2
            assert serving.exported("desired_replicas", model_name="m", pool="decode") == 2
            assert serving.exported("max_replicas", model_name="m", pool="decode") == 2
            assert serving.exported("input", pool="decode", input="sequences") >= SLOTS
            assert serving.exported("changes_total", pool="decode", direction="up", reason="slots") == 1
        finally:
            over.set()
        statuses = [status for client in clients for status in client.result()]
    serving.wait_for("both pools small again", decode={0, 1}, prefill={0, 1})
    assert len(statuses) >= CLIENTS and set(statuses) == {200}
    assert (1, 2, "slots") in serving.decisions("decode")
    assert {reason for low, high, reason in serving.decisions("prefill") if high > low} <= {"wake", "queue", "ttft"}


def test_idle_pools_end_and_are_healthy_and_the_next_request_starts_them(serving):
    serving.wait_for("asleep", decode={0}, prefill={0})
    assert serving.health() == 200
    assert serving.decisions("decode")[-1][1:] == (0, "idle")
    began = time.monotonic()
    assert serving.ask().status_code == 200
    assert serving.decisions("decode")[-1] == (0, 1, "wake")
    print(f"first answer from zero: {time.monotonic() - began:.1f} s")
    assert len(serving.engines("decode")) == 1
    assert "computes all prompts itself" in "".join(serving.server.log), "decode has not waited for the prefill pool"
