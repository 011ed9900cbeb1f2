"""Answers of a server whose replicas have two ranks, computed again by `manta verify` with another number of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.serve.serve_run import STARTUP_S, ServeRun

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_threads": 1, "num_gpu_blocks_override": 256}
REQUESTS = {
    "v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is an ocean?"}],
        "temperature": 0,
        "max_tokens": 60,
        "logprobs": True,
    },
    "v1/completions": {"prompt": "The river and the stone", "seed": 7, "temperature": 1.0, "max_tokens": 60, "n": 3,
                       "logprobs": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def answers(folder) -> dict[tuple[str, str], dict[str, Any]]:
    """By model and route."""
    models = [
        {
            "name": name,
            "model": "pocket",
            "engine": {**ENGINE, "tensor_parallel_size": 2, **engine},
            "decode": {"num_cpus": 0.2},
        }
        for name, engine in (("strict", {"determinism": "strict"}), ("plain", {}))
    ]
    with ServeRun(folder, {"models": models}, manta=True) as server:
        for _ in models:
            server.wait_for_line("replica ready", 3 * STARTUP_S)
        found = {}
        for model in ("strict", "plain"):
            for route, request in REQUESTS.items():
                body = {**request, "model": model, "ignore_eos": True, "return_token_ids": True}
                answer = httpx.post(f"{server.url}/{route}", json=body, timeout=120)
                assert answer.status_code == 200, answer.text
                found[model, route] = answer.json()
    return found


def verify(folder: Path, answers: dict[tuple[str, str], dict[str, Any]], model: str, ranks: int) -> list[str]:
    """What the command says of each answer, with its exit code; by a configuration with so many ranks."""
    config = yaml.safe_load((folder / "serve_config.yaml").read_text())
    for section in config["applications"][0]["args"]["models"]:
        section["engine"]["tensor_parallel_size"] = ranks
    (folder / "other.yaml").write_text(yaml.safe_dump(config))
    said = []
    for route, request in REQUESTS.items():
        body = {**request, "model": model, "ignore_eos": True, "return_token_ids": True}
        (folder / "request.json").write_text(json.dumps(body))
        (folder / "answer.json").write_text(json.dumps(answers[model, route]))
        files = [str(folder / name) for name in ("answer.json", "request.json")]
        result = CliRunner().invoke(app, ["verify", *files, "--model", str(folder / "other.yaml")])
        said.append(f"{result.exit_code} {result.output}")
    return said


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_strict_answer_of_two_ranks_is_found_equal_by_a_server_of_any_number_of_them(folder, answers, ranks):
    for said in verify(folder, answers, "strict", ranks):
        assert said.startswith("0 equal: tokens and log-probabilities"), said


def test_a_strict_answer_with_another_token_is_found_to_differ(folder, answers):
    changed = copy.deepcopy(answers)
    for answer in changed.values():
        answer["choices"][0]["token_ids"][5] += 1
    for said in verify(folder, changed, "strict", 1):
        assert said.startswith("1 choice 0, position 5: "), said


def test_an_answer_of_two_ranks_that_is_not_strict_is_found_equal_by_two_ranks(folder, answers):
    for said in verify(folder, answers, "plain", 2):
        assert said.startswith("0 equal: tokens and log-probabilities"), said


@pytest.mark.parametrize("ranks", [1, 4])
def test_of_an_answer_that_is_not_strict_another_number_of_ranks_can_say_only_why_not(folder, answers, ranks):
    for said in verify(folder, answers, "plain", ranks):
        assert said == "2 not computed: the server's system_fingerprint differs in options\n"
