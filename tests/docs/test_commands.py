"""Commands and programs of the pages run as written, or a table names the test that runs them, or why none does."""

from __future__ import annotations

import configparser
import getpass
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.config.pool_section import PoolSection
from tests.docs.pages import PAGES, block, blocks, commands, page, run
from tests.k8s.overlays import needs_helm, needs_kustomize
from tests.k8s.test_overlays import KUBERNETES
from tools.site import ROOT

HERE, SERVER = "tests/docs/test_commands.py", "tests/serve/test_pages.py"
CLUSTER, GPU, BUILDER = "needs a Kubernetes cluster", "needs a GPU", "needs root, Debian's packages and many minutes"
INDEX, PEERS, HOURS = "fetches from an index or the Hub", "needs another engine", "trains a model"
NODES = "needs several machines"
COMMANDS = {  # how a command begins -> the test that runs it, or why none does
    r"kubectl kustomize k8s/overlays/cpu-demo$": HERE,
    r"kubectl (-n manta )?create": HERE,
    r"helm install manta k8s/chart|helm upgrade manta k8s/chart": HERE,
    r"kubeconform": "is not packaged; tests/k8s validates by the same schemas",
    r"openssl req|curl --cacert|manta explain ID": "tests/docs/test_recipes.py",
    r"kubectl|kind|helm (install|upgrade|uninstall|repo|get)|openssl|head=": CLUSTER,
    r"docker|mmdebstrap|buildah|k8s/docker/start.sh": BUILDER,
    r"mkdir -p /etc|printf": HERE,
    r"systemctl": "changes a node",
    r"grep manta$": CLUSTER,
    r"manta k8s lint|helm template|manta hash-key": HERE,
    r"make (first-gpu|test-gpu|bench-gpu)": GPU,
    r".*manta serve (/models|.*--num-gpus)": f"{HERE} makes its configuration; to serve, it needs weights or a GPU",
    r"make (serve|install)": "tests/serve/test_start.py",
    r".*manta check Qwen": INDEX,
    r".*(pip|hf|uv|optimum-cli) |python\S* -m (venv|pip)": INDEX,
    r"manta serve pocket --num-threads": "tests/cluster/cli/test_serve.py",
    r"manta serve pocket --lora-modules": "tests/serve/replicas/test_lora.py",
    r"manta (serve pocket --max-replicas|bench serve)": "takes minutes",
    r"manta serve$": "tests/serve/test_installed.py",
    r"rand|manta serve --(host|served-model-name)": f"{HERE} makes its configuration",
    r"manta chat": "waits for a person",
    r"manta serve --speculative-config .*eagle3": "tests/engine/spec_decode/test_eagle3.py",
    r"manta serve --speculative-config": "tests/cluster/vllm/test_command.py",
    r".*manta doctor": "tests/serve/plain/test_cli.py",
    r"ray get-auth-token": HERE,
    r"ray |manta serve serve_config.yaml": NODES,
    r"manta generate|cat in.jsonl": "tests/docs/test_offline.py",
    r"serve run": "tests/serve/serve_run.py",
    r"serve deploy|echo|cat [^/]|manta verify": SERVER,
    r"python -c import sys,yaml": "tests/docs/test_observability.py",
    r"import json|for i in|python -c|.*manta simulate": HERE,
    r"manta bench offline": "tests/cluster/cli/bench",
    r"manta tape|manta replay": "tests/cluster/cli/parts/tape/test_tape.py",
    r"manta tune": "tests/cluster/cli/parts/tape/test_tune.py",
    r"curl .*(v1/models|embeddings|rerank)": "tests/serve/test_embeddings.py",
    r"curl .*(/key/|usage|/metrics|lora_adapter|[sS]ession)|grep manta_key": "tests/docs/test_recipes.py",
    r"cat /tmp/ray|select|startswith": "tests/docs/test_recipes.py",
    r"curl": SERVER,
    r"claude": "tests/clients/test_command_lines.py",
    r"python -m tools.pocket": HOURS,
    r"python -m benchmarks.(peers|embeddings)": PEERS,
    r"python -m benchmarks.random_gguf": "writes a model of 0.58 billion weights",
    r"python -m benchmarks.(isolation|lora|costs|bills|pipeline_stages|quotas|fair_costs|what_if)": "takes minutes",
    r"python -m benchmarks.simulator.fit": "tests/benchmarks/simulator",
    r"python -m benchmarks.simulator.write_trace": HERE,
}


def test_contributing_lists_every_make_target_that_tests():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    listed = re.findall(r"^\| `make ([\w-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    testing = {
        target
        for target in targets[1].split()
        if re.search(r"\bpytest\b", subprocess.check_output(["make", "-n", "-C", ROOT, target], text=True))
    }
    assert {"test", "test-all", "test-browser", "test-gpu"} <= testing <= {*listed}
    assert {*listed} <= {*targets[1].split()}


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


@needs_kustomize
def test_kubectl_makes_the_objects_that_the_overlays_need(tmp_path):
    """Without a cluster: `--dry-run=client` prints them."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    (tmp_path / "keys").write_text("alice:0\n")
    found = re.findall(r"^kubectl (?:-n manta )?create [^#\n]*", page("k8s/README.md").read_text(), re.MULTILINE)
    commands = [re.sub(r"<[^>]*>", "x", command).strip() + " --dry-run=client -o name" for command in found]
    made = run("\n".join(commands), tmp_path).split()
    assert made == [
        "namespace/manta",
        *(f"secret/manta-{name}" for name in ("ray-auth", "redis", "api-keys", "metrics-key", "hub-token")),
    ]


@needs_helm
def test_helm_accepts_the_values_of_the_page():
    """Rendered, since there is no cluster to install in."""
    reused = "--reset-then-reuse-values"
    for text in blocks(page("k8s/README.md"), "bash"):
        for line in text.splitlines():
            if re.match("helm (install|upgrade) manta k8s/chart", line):
                command = re.sub("helm (install|upgrade)", "helm template", line)
                overlay = "" if "helm template" in text else "--set overlay=single-gpu"
                assert "kind: RayService" in run(command.replace(reused, overlay), ROOT)


@needs_helm
def test_the_cost_of_a_new_version_is_told_by_the_commands_of_the_page(tmp_path):
    (tmp_path / "k8s").symlink_to(ROOT / "k8s")
    (tmp_path / "values.yaml").write_text("overlay: single-gpu\n")
    text = block("docs/deploy.md", "bash", with_="--before")
    runs = "helm template manta k8s/chart -n manta --no-hooks -f values.yaml"
    told = run(text.replace("helm get manifest manta -n manta", runs), tmp_path)
    assert "KubeRay starts a second RayCluster" in told


def test_files_that_a_page_writes_say_what_it_promises(tmp_path):
    text = block("k8s/README.md", "bash", with_="LimitMEMLOCK").replace("/etc/", f"{tmp_path}/")
    run(text[: text.index("systemctl")], tmp_path)
    unit = configparser.ConfigParser()
    unit.read(tmp_path / "systemd/system/containerd.service.d/memlock.conf")
    assert unit["Service"]["LimitMEMLOCK"] == "infinity"
    (line,) = [
        line
        for line in block("docs/measurements/image.md", "bash", with_="FROM scratch").splitlines()
        if line.startswith("printf")
    ]
    run(line, tmp_path)
    assert (tmp_path / "Base").read_text() == "FROM scratch\nADD rootfs.tar /\n"


def test_a_unit_of_systemd_lets_running_requests_end(tmp_path):
    text = block("docs/deploy.md", "ini", with_="ExecStart")
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string(text)
    service = unit["Service"]
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) >= PoolSection.model_fields["drain_s"].default + 60
    if shutil.which("systemd-analyze") is not None:
        text = text.replace("/opt/manta/bin/manta", sys.executable).replace("User=manta", f"User={getpass.getuser()}")
        (tmp_path / "manta.service").write_text(text)
        run(f"systemd-analyze verify {tmp_path / 'manta.service'}", tmp_path)


def test_the_pod_that_fills_the_volume_by_hand_is_one_that_a_restricted_namespace_accepts():
    pod = yaml.safe_load(block("docs/deploy.md", "yaml", with_="kind: Pod"))
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    (container,), spec = pod["spec"]["containers"], pod["spec"]
    job = yaml.safe_load((ROOT / "k8s/components/model-cache/download_job.yaml").read_text())["spec"]["template"][
        "spec"
    ]
    assert spec["securityContext"] == job["securityContext"]
    assert container["securityContext"] == job["containers"][0]["securityContext"]
    assert [volume for volume in job["volumes"] if volume["name"] == "models"] == spec["volumes"]


@pytest.mark.slow
def test_ray_makes_the_token_that_every_node_needs(tmp_path):
    lines = block("docs/deploy.md", "bash", with_="get-auth-token").splitlines()
    run("\n".join(lines[:2]), tmp_path, HOME=str(tmp_path))
    assert (tmp_path / ".ray" / "auth_token").read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        command
        for name in ("docs/simulator.md", "docs/costs.md", "docs/measurements/autoscaling.md", "README.md")
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
    [("README.md", "llm.generate"), ("docs/offline.md", "llm.generate"), ("docs/speculative_decoding.md", "ngram")],
)
def test_a_program_that_needs_no_server_runs(name, with_, tmp_path):
    program = block(name, "python", with_=with_)
    if "import" not in program:
        program = f"from manta import LLM\n{program}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=240)
