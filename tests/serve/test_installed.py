"""The wheel, away from the checkout: one server, one offline answer, one pair of prefill and decode, one upgrade.

`pytest -s` prints how long each took.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.distribution import version_and_commit
from cluster.model_info import model_info
from engine import LLM, SamplingParams
from tests.serve.installed import PIP, Installed, build_wheel, wheel_of
from tests.serve.serve_run import ServeRun

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROMPT = "An ocean is"
OFFLINE = """
import json, sys
import cluster, deployments, engine
from manta import LLM, SamplingParams

assert engine.WHOSE == cluster.WHOSE == deployments.WHOSE == "the user"
with LLM("pocket", dtype="float32", num_threads=1, tensor_parallel_size=int(sys.argv[1])) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    print(json.dumps(llm.generate(["An ocean is"], params, use_tqdm=False)[0].outputs[0].text))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM("pocket", dtype="float32", num_threads=1) as llm:
        return llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)[0].outputs[0].text


def test_one_name_is_added_to_the_environment_and_the_other_cluster_stays(installed):
    program = "import cluster, manta; print(cluster.WHOSE, '|', manta.__file__)"
    whose, _, file = installed.run(installed.python, "-I", "-c", program).strip().partition(" | ")
    assert whose == "the other distribution" and file.startswith(str(installed.environment_folder))
    assert installed.run(installed.manta, "--version") == f"manta {version_and_commit()}\n"
    assert "names" not in [
        finding["topic"] for finding in json.loads(installed.run(installed.manta, "doctor", "--json"))
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offline_answer_beside_the_users_own_modules(installed, expected, ranks):
    (installed.user_folder / "ask.py").write_text(OFFLINE)
    assert json.loads(installed.run(installed.python, "ask.py", str(ranks))) == expected


@pytest.mark.parametrize("pools", [{}, {"prefill": {"num_cpus": 0.4}, "handoff": {"policy": "always"}}])
def test_a_server_answers_from_the_wheel(installed, expected, tmp_path, pools):
    model = {"name": "pocket", "model": "pocket", "engine": {"dtype": "float32", "num_threads": 1}, **pools}
    began, token = time.monotonic(), {"RAY_AUTH_MODE": "token"}  # which Ray cannot keep in this home
    model["decode"] = {"num_cpus": 0.4}
    with ServeRun(tmp_path, {"models": [model]}, installed=installed, environment=token) as server:
        server.wait_until_healthy(2 if pools else 1)
        body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
        print(f"\n| {sorted(pools) or 'one replica'} | {time.monotonic() - began:.1f} s to the first answer |")
        assert answer["choices"][0]["text"] == expected
        assert answer["system_fingerprint"] == model_info(ModelSection(**model), IngressSection()).fingerprint
        assert str(ROOT) not in "".join(server.log).replace(str(installed.environment_folder), "")
        if pools:
            metrics = httpx.get(f"{server.url}/metrics").text
            assert [line for line in metrics.splitlines() if "pd_decision_total{" in line and "remote" in line]


def test_a_file_of_the_users_that_would_hide_manta_from_rays_workers_ends_the_start_with_one_line(installed):
    file = installed.user_folder / "manta.py"
    file.touch()
    try:
        done = subprocess.run(
            [installed.manta, "serve", "pocket", "--address", "local"], cwd=installed.user_folder,
            env=installed.environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        file.unlink()
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"manta: Ray's workers would import {file} instead of Manta's `manta`. Rename it, or start in another folder"
    )


def test_another_distribution_manta_is_named_at_the_start_and_by_the_doctor(installed, tmp_path):
    (ours,) = installed.environment_folder.rglob("manta/__init__.py")
    text = ours.read_text()
    another = wheel_of("manta", tmp_path)
    subprocess.run([*PIP, "--python", str(installed.python), "install", "--no-deps", "--no-index", "-q", str(another)],
                   check=True, timeout=300)  # fmt: skip
    try:
        done = subprocess.run(
            [installed.manta, "serve", "pocket", "--address", "local"], cwd=installed.user_folder,
            env=installed.environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ours.read_text() != text, "pip has overwritten it without a word"
        assert done.returncode == 1 and "`manta` is also a package of manta" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    finally:
        subprocess.run([*PIP, "--python", str(installed.python), "uninstall", "-y", "-q", "manta"], check=True)
        ours.write_text(text)


def test_an_ingress_that_cannot_start_ends_the_start_with_one_line(installed, tmp_path):
    args = {"models": [{"name": "pocket", "model": "pocket"}], "ingress": {"batch_dir": "/dev/null/batches"}}
    with ServeRun(tmp_path, args, installed=installed) as server:
        server.wait_for_line("manta cannot start. configuration: ingress.store must be a writable SQLite file")
        assert server.wait(120) == 1
