"""Commands and programs of the pages run as written, or a table names the test that runs them, or why none does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from tests.docs.test_pages import PAGES, blocks, commands
from tests.k8s.overlays import needs_helm, needs_kustomize
from tests.serve.serve_run import ServeRun
from tools.site import ROOT

HERE = str(Path(__file__).relative_to(ROOT))
CLUSTER, GPU, BUILDER = "needs a Kubernetes cluster", "needs a GPU", "needs root, Debian's packages and many minutes"
INDEX, PEERS, HOURS = "fetches from an index or the Hub", "needs another engine", "trains a model"
NODES = "needs several machines"
COMMANDS = {  # how a command begins -> the test that runs it, or why none does
    r"kubectl kustomize k8s/overlays/cpu-demo$": HERE,
    r"kubeconform": "is not packaged; tests/k8s validates by the same schemas",
    r"kubectl|kind|helm (install|upgrade|repo)|openssl|head=": CLUSTER,
    r"docker|mmdebstrap|buildah|k8s/docker/start.sh|printf FROM": BUILDER,
    r"mkdir -p /etc|printf \[Service|systemctl|printf": "changes a node",
    r"grep manta$": CLUSTER,
    r"manta k8s lint|helm template|manta hash-key": HERE,
    r"make (test-gpu|bench-gpu)|.*--num-gpus": GPU,
    r"make (serve|install)": "tests/serve/test_start.py",
    r".*manta (check Qwen|serve /models)": INDEX,
    r".*(pip|hf|uv|optimum-cli) |python\S* -m (venv|pip)": INDEX,
    r"manta serve$": "tests/serve/test_installed.py",
    r"manta serve --speculative-config .*eagle3": "tests/engine/spec_decode/test_eagle3.py",
    r"manta serve --speculative-config": "tests/cluster/vllm/test_command.py",
    r".*manta doctor": "tests/serve/plain/test_cli.py",
    r"ray |manta serve serve_config.yaml": NODES,
    r"serve deploy": HERE,
    r"echo|cat|import json|for i in|python -c|manta verify|.*manta simulate|manta bench offline": HERE,
    r"curl .*(v1/models|embeddings|rerank)": "tests/serve/test_embeddings.py",
    r"curl": HERE,
    r"claude": "tests/clients/test_command_lines.py",
    r"python -m tools.pocket": HOURS,
    r"python -m benchmarks.(peers|embeddings)": PEERS,
    r"python -m benchmarks.isolation": "measures for minutes",
    r"python -m benchmarks.simulator.fit": "tests/benchmarks/simulator",
    r"python -m benchmarks.simulator.write_trace": HERE,
}
BIN = Path(sys.executable).parent


def page(name: str) -> Path:
    return ROOT / name


def block(name: str, *languages: str, with_: str) -> str:
    """The block of a page that contains `with_`."""
    (found,) = [text for text in blocks(page(name), *languages) if with_ in text]
    return found


def run(script: str, folder: Path, **variables: str) -> str:
    """Run a script of bash in a folder with `manta` on its path, and return what it prints."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_every_command_of_a_page_is_run_by_a_test_or_the_table_says_why_not():
    met = set()
    for file in PAGES:
        for words in commands(file):
            text = " ".join(words)
            found = next((start for start in COMMANDS if re.match(start, text)), None)
            assert found is not None, f"{file.relative_to(ROOT)}: {text}"
            met.add(found)
    assert met == set(COMMANDS), f"no page has {set(COMMANDS) - met}"
    for runner in COMMANDS.values():
        assert not runner.startswith("tests/") or (ROOT / runner.split(" ")[0]).exists(), runner


@pytest.mark.parametrize(
    "words",
    [words for file in PAGES for words in commands(file) if Path(words[0]).name == "manta" and words[1:2] == ["serve"]],
    ids=lambda words: " ".join(words[2:4]),
)
def test_the_flags_of_manta_serve_make_a_configuration(words):
    if "serve_config.yaml" in words:
        return  # a file has no flags
    result = CliRunner().invoke(app, [*words[1:], "--print-config"])
    assert result.exit_code == 0, result.exception or result.output


def test_keys_are_made_by_the_command_of_the_page(tmp_path):
    lines = [line.partition("#")[0] for line in block("k8s/README.md", "bash", with_="hash-key").splitlines()]
    run("\n".join(line for line in lines if line.startswith("manta hash-key")), tmp_path)
    names = [line.partition(":")[0] for line in (tmp_path / "keys").read_text().splitlines()]
    assert names == ["alice", "prometheus"]


@needs_helm
@needs_kustomize
def test_what_helm_and_kustomize_render_passes_the_lint(tmp_path):
    (template,) = [
        line for line in block("k8s/README.md", "bash", with_="helm template").splitlines() if "lint" in line
    ]
    text = block("k8s/README.md", "bash", with_="kubeconform")
    lint, kustomize = (line.partition(" #")[0].partition("|")[0] for line in text.splitlines()[:2])
    for command in (template, lint, kustomize):
        run(command, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        command
        for name in ("docs/simulator.md", "README.md")
        for text in blocks(page(name), "bash")
        for command in text.splitlines()
        if re.search(r"manta simulate|write_trace", command)
    ],
)
def test_a_command_of_the_simulator_ends_with_a_report(command, tmp_path):
    """With 300 requests, and what the command before it has written."""
    (tmp_path / "load.jsonl").write_text('{"timestamp": 0, "input_length": 1000, "output_length": 200}\n' * 300)
    command = re.sub(r" --requests \d+|\.venv/bin/", "", command.partition(" #")[0])
    assert run(f"{command} --requests 300", tmp_path, PYTHONPATH=str(ROOT)) or "write_trace" in command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "with_"),
    [("README.md", "llm.generate"), ("docs/speculative_decoding.md", "ngram")],
)
def test_a_program_that_needs_no_server_runs(name, with_, tmp_path):
    program = block(name, "python", with_=with_)
    if "import" not in program:
        program = f"from manta import LLM\n{program}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def server(folder) -> Iterator[ServeRun]:
    """The bundled model, under the names that pages use. The folder is also its home: another model may be in ours."""
    models = [{"name": "default", "aliases": ["pocket", "qwen3"], "model": "pocket"}]
    server = ServeRun(folder, {"models": models}, manta=True, environment={"HOME": str(folder)})
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def here(text: str, server: ServeRun) -> str:
    return re.sub(r"(http://)?(127\.0\.0\.1|localhost):8000", server.url, text)


@pytest.mark.serve
@pytest.mark.slow
class TestAgainstAServer:
    @pytest.mark.parametrize("name", ["README.md", "k8s/README.md", "docs/responses.md"])
    def test_a_request_is_answered(self, name, server, folder):
        text = block(name, "bash", with_="What is an ocean?")
        answer = json.loads(run(here(text[text.index("curl") :], server), folder))
        assert "choices" in answer or "output" in answer

    def test_an_answer_is_verified(self, server, folder):
        text = block("docs/determinism.md", "bash", with_="manta verify")
        assert run(here(text, server), folder, HOME=str(folder)).count("equal") == 2

    def test_a_stream_is_resumed_from_the_event_that_its_client_had(self, server, folder):
        text = here(block("docs/idempotency.md", "bash", with_="Last-Event-ID"), server)
        first, _, rest = text.partition("# id: ")
        events = re.findall(r"^id: (\S+)$", run(first, folder), re.MULTILINE)
        resume = rest[rest.index("curl") :]
        shown = re.search(r"Last-Event-ID: (\S+)'", resume)
        assert shown is not None
        resume = resume.replace(shown[1], events[0]).replace(shown[1].partition(":")[0], events[0].partition(":")[0])
        assert re.findall(r"^id: (\S+)$", run(resume, folder), re.MULTILINE) == events[1:]

    def test_a_batch_is_answered(self, server, folder):
        text = here(block("docs/batches.md", "bash", with_="BATCH_ID"), server)
        script = re.split(r"^(?=curl)", text, flags=re.MULTILINE)
        upload, create, poll, fetch = script[0] + script[1], *script[2:]
        file = json.loads(run(upload, folder))["id"]
        batch = json.loads(run(create.replace("file-...", file), folder))
        deadline = time.monotonic() + 120
        while batch["status"] != "completed":
            assert time.monotonic() < deadline and batch["status"] in ("validating", "in_progress", "finalizing"), batch
            batch = json.loads(run(poll.replace("BATCH_ID", batch["id"]), folder))
        answers = run(fetch.replace("OUTPUT_FILE_ID", batch["output_file_id"]), folder).splitlines()
        assert {json.loads(answer)["custom_id"] for answer in answers} == {"a", "b"}

    def test_anthropics_client_is_answered(self, server):
        program = here(block("docs/anthropic.md", "python", with_="messages.create"), server)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

    def test_a_configuration_is_deployed_again(self, server, folder):
        (command,) = blocks(page("docs/operations.md"), "bash")
        dashboard = server.dashboard()
        run(command.replace("http://127.0.0.1:8265", dashboard), folder)
