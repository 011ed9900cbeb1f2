"""Start, failure and end of `serve run`."""

from __future__ import annotations

import httpx
import psutil
import pytest

from tests.serve.serve_run import ServeRun, wait_until

pytestmark = pytest.mark.serve


def test_ctrl_c_ends_serve_run_and_all_its_processes(tmp_path, model_folder):
    server = ServeRun(tmp_path, {"models": [{"name": "tiny", "model": str(model_folder)}]})
    try:
        server.wait_until_healthy()
        processes = server.processes()
        server.interrupt()
        assert server.wait(timeout_s=20) == 0
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"engine": {"block_sise": 16}}, "models[0].engine.block_sise must be one of the known keys"),
        ({"model": "/no/such/folder"}, "model '/no/such/folder'"),
        ({"engine": {"kv_cache_memory_gib": 1e-6}}, "raise kv_cache_memory_gib"),
    ],
)
def test_mistake_in_the_configuration_ends_serve_run_with_one_clear_line(tmp_path, model_folder, model, message):
    server = ServeRun(tmp_path, {"models": [{"name": "tiny", "model": str(model_folder), **model}]})
    try:
        server.wait_for_line("manta cannot start. ", timeout_s=60)
        assert server.wait(timeout_s=30) != 0
        assert message in "".join(server.log)
        assert "Traceback" not in "".join(server.log)
    finally:
        server.stop()


def test_death_of_the_engine_fails_its_requests_and_a_new_replica_serves(tmp_path, model_folder):
    server = ServeRun(tmp_path, {"models": [{"name": "tiny", "model": str(model_folder)}]})
    try:
        server.wait_until_healthy()
        body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert "text_completion" in next(lines)
            (rank,) = [p for p in server.processes() if "RankActor" in p.name() or "RankActor" in " ".join(p.cmdline())]
            rank.kill()
            rest = [line for line in lines if line]
        assert "engine_unavailable" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        server.wait_for_line("replica ready")
        wait_until(lambda: httpx.get(f"{server.url}/health", timeout=5).status_code == 200)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "The"}, timeout=30)
        assert answer.status_code == 200
    finally:
        server.stop()
