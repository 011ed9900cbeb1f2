"""Start and failure of `serve run` and `manta serve`.

How they end in order: haproxy/test_prefill_decode.py, test_rank_groups.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from cluster.autoscaling.slo import POLICY
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve


@contextmanager
def impatient_client(url: str) -> Iterator[None]:
    """Finds out by trying whether a server is there, and gives each try a second."""
    left = threading.Event()

    def ask() -> None:
        while not left.wait(0.1):
            with suppress(httpx.TransportError):
                httpx.post(f"{url}/v1/completions", json={"prompt": "The", "max_tokens": 2}, timeout=1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manta", "model", "message"),
    [
        (False, {"engine": {"block_sise": 16}}, "models[0].engine.block_sise must be one of the known keys"),
        (True, {"engine": {"kv_cache_memory_bytes": 1000}}, "raise kv_cache_memory_bytes"),
    ],
    ids=["serve run", "manta serve"],
)
def test_mistake_in_the_configuration_ends_the_server_with_one_clear_line(
    tmp_path, model_folder, manta, model, message
):
    args = {"models": [{"name": "tiny", "model": str(model_folder), **model}]}
    with ServeRun(tmp_path, args, manta=manta) as server:
        server.wait_for_line("manta cannot start. ", timeout_s=120)
        assert server.wait(timeout_s=30) != 0
        assert message in "".join(server.log)
        assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_change_that_cannot_be_made_leaves_serve_run_to_be_changed_again(tmp_path, model_folder):
    def models(**engine: Any) -> dict[str, Any]:
        return {"models": [{"name": "tiny", "model": str(model_folder), "engine": engine}]}

    def answers() -> bool:
        request = {"prompt": "The", "max_tokens": 2}
        return httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).status_code == 200

    with ServeRun(tmp_path, models()) as server:
        with impatient_client(server.url):
            server.wait_for_line(f" ready address={server.url} models=tiny seconds=")
        started = "".join(server.log).partition(" ready address=")[0]
        assert "reason=abort" not in started and started.count("no replica is up") <= 1, started
        assert answers()
        server.put(models(block_sise=16))
        wait_until(lambda: server.status() == "DEPLOY_FAILED", timeout_s=60)
        assert answers(), "what the builder refuses changes nothing"
        server.put(models(kv_cache_memory_bytes=1000))
        server.wait_for_line("raise kv_cache_memory_bytes")  # the engine, which has taken the place of the only one
        wait_until(lambda: server.status() == "DEPLOY_FAILED", timeout_s=60)
        server.put(models())
        wait_until(answers, timeout_s=120)
        assert "manta cannot start" not in "".join(server.log)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, POLICY])
def test_pools_that_serve_would_scale_by_its_own_policy_are_told_of_in_the_log(tmp_path, model_folder, policy):
    model = {"name": "tiny", "model": str(model_folder), "decode": {"max_replicas": 2}}
    with ServeRun(tmp_path, {"models": [model]}, policy=policy) as server:
        server.wait_until_healthy()
        warnings = [line for line in server.log if "autoscaling_policy.policy_function must be" in line]
        assert len(warnings) == (policy is None)


@pytest.mark.slow
def test_request_waits_for_a_new_replica_when_its_only_one_dies(tmp_path, model_folder):
    with ServeRun(tmp_path, {"models": [{"name": "tiny", "model": str(model_folder)}]}) as server:
        server.wait_until_healthy()
        body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
        expected = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
        stream = {**body, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=stream, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            answer = [next(lines)]
            (rank,) = [p for p in server.processes() if "RankActor" in p.name() or "RankActor" in " ".join(p.cmdline())]
            rank.kill()
            answer += lines
        assert answer.pop() == "data: [DONE]"
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in answer]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["finish_reason"] == "length"
        server.wait_for_line("request replayed")
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
