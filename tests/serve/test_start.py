"""Start and end of `manta serve` where the machine is slow, and by SIGTERM."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from deployments.ray_driver import patience
from tests.models import make_model
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

SLOW_AGENTS = """
import sys, time
if any(arg.endswith(("dashboard/agent.py", "agent/main.py")) for arg in sys.orig_argv):
    time.sleep(20)
"""


def args(model_folder: Path) -> dict[str, object]:
    return {"models": [{"name": "tiny", "model": str(model_folder), "engine": {"num_threads": 1}}]}


def test_agents_of_ray_that_take_longer_than_it_waits_for_them_end_no_start_and_sigterm_ends_it_with_0(
    tmp_path, model_folder, monkeypatch
):
    """On a very busy machine they do."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with ServeRun(tmp_path, args(model_folder), manta=True) as server:
        server.wait_for_line(f"ready address={server.url}", timeout_s=270)
        server.terminate()
        assert server.wait(timeout_s=120) == 0
        assert "Traceback" not in "".join(server.log) and "SIGTERM" not in "".join(server.log)


def test_sigterm_lets_a_stream_that_runs_end_and_takes_no_new_request(tmp_path):
    sizes = {"num_hidden_layers": 12, "max_position_embeddings": 2048}  # slow enough to be met in the middle
    model = make_model(tmp_path / "model", "llama", tokenizer=True, **sizes)
    server = ServeRun(tmp_path, args(model), manta=True)
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    try:
        server.wait_for_line(f"ready address={server.url}", timeout_s=270)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.terminate()
            wait_until(lambda: _status(f"{server.url}/v1/models") == 503)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 2000
        assert server.wait(timeout_s=120) == 0
    finally:
        server.stop()


def _status(url: str) -> int:
    return httpx.get(url, timeout=60).status_code


def test_a_ray_that_does_not_start_is_told_in_one_line(tmp_path, model_folder):
    folder = {"RAY_TMPDIR": str(tmp_path / ("x" * 100))}  # too long for paths of sockets
    with ServeRun(tmp_path, args(model_folder), manta=True, environment=folder) as server:
        assert server.wait(timeout_s=120) == 1
        (line,) = [line for line in server.log if "Ray does not start" in line]
        assert line.startswith("manta: ") and "The machine's load is " in line
        assert "Traceback" not in "".join(server.log)


def test_patience_grows_with_the_load_and_is_never_less_than_on_an_idle_machine(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, expected in ((0.0, 1.0), (2.0, 1.0), (9.0, 4.5)):
        monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))  # noqa: B023
        assert patience() == expected
