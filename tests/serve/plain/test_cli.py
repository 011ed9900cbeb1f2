"""Commands of `manta` against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.serve.fake_cluster import FakeCluster
from tests.serve.serve_run import free_port, ray_environment, wait_until

pytestmark = pytest.mark.serve

MANTA = str(Path(sys.executable).with_name("manta"))


def explained(url: str, name: str) -> dict[str, Any]:
    """The only sequence of a request."""
    result = CliRunner().invoke(app, ["explain", name, "--url", url, "--json"])
    assert result.exit_code == 0, result.output
    (sequence,) = json.loads(result.stdout)["sequences"]
    return dict(sequence)


def test_request_is_explained_by_its_ingress_and_its_engine_under_the_id_that_its_client_got(server, client):
    answer = client.completions.with_raw_response.create(
        model="tiny", prompt="What is it?", max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    by_answer = explained(server.url, answer.parse().id)
    assert by_answer["request_id"] == explained(server.url, answer.headers["x-request-id"])["request_id"]
    assert (by_answer["reason"], by_answer["output_tokens"]) == ("length", 5)
    (engine,) = by_answer["engines"]
    assert engine.startswith("decode-tiny-")
    assert any(event["what"].startswith(f"routed to {engine}: ") for event in by_answer["events"])
    told = [event["what"] for event in by_answer["events"] if event["where"] == engine]
    assert told[-2:] == ["first token", "ended: length, 5 output tokens"]


def test_explanation_for_people_says_what_was_waited_for_and_what_happened_when(server, client):
    answer = client.completions.create(model="tiny", prompt="What is it?", max_tokens=5)
    result = CliRunner().invoke(app, ["explain", answer.id, "--url", server.url])
    assert result.exit_code == 0, result.output
    for part in ("for admission", "in the engine's queue", "decode-tiny-", "the request came", "first token"):
        assert part in result.stdout


def test_request_that_nobody_knows_is_told_so(server):
    result = CliRunner().invoke(app, ["explain", "never/sent?", "--url", server.url])
    assert str(result.exception).startswith("request 'never/sent?' is unknown")


def test_chat_gets_the_same_answer_as_the_official_client(server, client):
    question = [{"role": "user", "content": "What is it?"}]
    expected = client.chat.completions.create(model="tiny", messages=question, max_tokens=8, temperature=0)
    command = ["chat", "--url", server.url, "--temperature", "0", "--max-tokens", "8"]
    result = CliRunner().invoke(app, command, input="What is it?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{expected.choices[0].message.content}\n"


@pytest.mark.slow
def test_manta_serve_serves_a_model_folder_behind_haproxy_and_ctrl_c_ends_all_of_it(model_folder: Path):
    port = free_port()
    flags = ["--port", str(port), "--served-model-name", "mine", "--num-threads", "1", "--max-model-len", "128"]
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as ray_folder:  # socket paths must be short
        process = subprocess.Popen(
            [MANTA, "serve", str(model_folder), "--address", "local", *flags],
            env=ray_environment(ray_folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
        )
        processes = []
        try:
            wait_until(lambda: is_healthy(port), timeout_s=240)
            (model,) = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("mine", 128)
            processes = psutil.Process(process.pid).children(recursive=True)
            assert any("haproxy" in child.name() for child in processes)
            os.kill(process.pid, signal.SIGINT)
            process.wait(60)
            assert psutil.wait_procs(processes, timeout=30)[1] == []
        finally:
            for left in [*processes, psutil.Process(process.pid)] if process.poll() is None else processes:
                if left.is_running():
                    left.kill()
            process.wait(30)


@pytest.mark.slow
def test_doctor_says_which_replicas_fit_the_nodes_of_a_cluster(tmp_path: Path, model_folder: Path):
    with FakeCluster([{"num_cpus": 1}, {"num_cpus": 2, "labels": {"pool": "decode"}}]) as cluster:
        config = tmp_path / "serve_config.yaml"
        decode = {"num_cpus": 1.5, "label_selector": {"pool": "decode"}}
        models = [{"name": "tiny", "model": str(model_folder), "decode": decode}]
        app = {"name": "manta", "import_path": "manta:build", "args": {"models": models}}
        for num_replicas, code in ((1, 0), (3, 1)):
            decode["num_replicas"] = num_replicas
            config.write_text(yaml.safe_dump({"applications": [app]}))
            done = subprocess.run(
                [MANTA, "doctor", "--address", cluster.address, "--config", str(config), "--json"],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.stdout, done.stderr
            found = [(f["topic"], f["level"], f["message"]) for f in json.loads(done.stdout)]
            assert done.returncode == code, found
            assert ("decode of tiny", "ok", "a replica fits the cluster") in found
            assert sum("pool=decode" in told for topic, _, told in found if topic == "Ray cluster") == 1
            assert (code == 1) == any(topic == "all replicas" and level == "problem" for topic, level, _ in found)


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False
