"""Published files of Ray Serve LLM, each put to a real Ray cluster with another import path, as `serve deploy` does.

The cluster has fake GPUs of the types that they name, and small models stand in the place of theirs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.engine.model.quantization.checkpoints import FORMATS, quantize_folder
from tests.models import make_model
from tests.serve.fake_cluster import FakeCluster
from tests.serve.pod_environment import pod_environment
from tests.serve.serve_run import free_port, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES = yaml.safe_load((Path(__file__).parents[1] / "cluster" / "ray_serve_llm_samples.yaml").read_text())
TYPES = ("A10G", "A100-40G", "L4", "T4")
TOKEN = {"HF_TOKEN": "hf_of_the_environment"}  # one of them names it, and Serve shows our builder `args` only
STARTUP_S = 500.0
SIZES = {  # that eight ranks and the lengths of the samples fit
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**18,
}


class Cluster:
    """A Ray cluster without applications of its own."""

    def __init__(self, folder: Path):
        """folder: for files of HAProxy; a short path."""
        dashboard, self.port = free_port(), free_port()
        self._applications = f"http://127.0.0.1:{dashboard}/api/serve/applications/"
        resources = {f"accelerator_type:{name}": 1 for name in TYPES}
        head = {"num_cpus": 16, "num_gpus": 8, "resources": resources, "include_dashboard": True,
                "dashboard_port": dashboard}  # fmt: skip
        self.ray = FakeCluster([head], pod_environment(folder) | TOKEN)

    def put(self, config: dict[str, Any]) -> None:
        http_options = {"host": "127.0.0.1", "port": self.port}
        httpx.put(self._applications, json={**config, "http_options": http_options}, timeout=120).raise_for_status()

    def is_running(self, name: str) -> bool:
        application = httpx.get(self._applications, timeout=60).json()["applications"][name]
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        return application["status"] == "RUNNING"

    def answers(self, config: dict[str, Any]) -> bool:
        """config: an LLMConfig."""
        model = config["model_loading_config"]["model_id"]
        if config.get("engine_kwargs", {}).get("task") == "embed":
            route, body = "embeddings", {"model": model, "input": "An ocean"}
        else:
            messages = [{"role": "user", "content": "What is an ocean?"}]
            route, body = "chat/completions", {"model": model, "messages": messages, "max_tokens": 4}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/{route}", json=body, timeout=300).status_code == 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.ray.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str | None, str]:
    """Folders of models, by quantization."""
    plain = make_model(tmp_path_factory.mktemp("qwen2"), "qwen2", tokenizer=True, **SIZES)
    quantized = tmp_path_factory.mktemp("quantized") / "awq"
    shutil.copytree(plain, quantized)
    quantize_folder(plain, quantized, tmp_path_factory.mktemp("twin"), *FORMATS["awq"])
    return {None: str(plain), "awq": str(quantized)}


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample["from"] for sample in SAMPLES])
def test_a_published_file_is_deployed_by_changing_one_line_and_its_models_answer(sample, cluster, small, tmp_path):
    (application,) = sample["serve"]["applications"]
    application["import_path"] = "manta:build_openai_app"
    configs = application["args"]["llm_configs"]
    for name in sample.get("files", {}):  # the cluster has another folder
        (tmp_path / name).parent.mkdir(exist_ok=True)
        configs[configs.index(name)] = str(tmp_path / name)
    every = [*sample.get("files", {}).values(), *(config for config in configs if isinstance(config, dict))]
    for config in every:
        config["model_loading_config"]["model_source"] = small[sample.get("quantized")]
    for name, config in sample.get("files", {}).items():
        (tmp_path / name).write_text(yaml.safe_dump(config))
    cluster.put(sample["serve"])
    wait_until(lambda: cluster.is_running(application.get("name", "default")), STARTUP_S)
    for config in every:
        wait_until(lambda config=config: cluster.answers(config), STARTUP_S)
