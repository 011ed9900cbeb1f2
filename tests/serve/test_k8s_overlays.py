"""The Serve configuration of each Kubernetes overlay, put to a real Ray cluster by REST, as the KubeRay operator does.

The cluster has fake GPUs and labels, and runs with the environment that all Ray pods have. Where a model would have to
be downloaded, the bundled one is served instead, with its own context length; all else is as it stands.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.frontend.api_keys import hash_key
from tests.serve.fake_cluster import FakeCluster
from tests.serve.pod_environment import pod_environment
from tests.serve.serve_run import free_port, wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]

K8S = Path(__file__).parents[2] / "k8s"
KEY = "sk-of-a-test"
STARTUP_S = 150.0
WORKERS = [  # between them they have a place for every overlay; pods of the overlays are larger
    {"num_cpus": 9, "num_gpus": 2, "labels": {"pool": "decode"}},
    {"num_cpus": 9, "num_gpus": 2, "labels": {"pool": "prefill"}},
    {"num_cpus": 3, "labels": {"pool": "ingress"}},
]
REPLICAS = {  # of each deployment, when nobody asks anything
    "cpu-demo": {"ingress": 2, "decode-pocket": 2},
    "single-gpu": {"ingress": 2, "decode-qwen3-8b": 1},
    "multi-node-tp": {"ingress": 2, "decode-llama-3.3-70b": 1},
    "multi-node-pp": {"ingress": 2, "decode-llama-3.3-70b": 1},
    "pd-disagg": {"ingress": 2, "prefill-qwen3-8b": 1, "decode-qwen3-8b": 1},
}


class Head:
    """What the operator sees of a Ray cluster."""

    def __init__(self, folder: Path):
        self.dashboard, self.port = f"http://127.0.0.1:{free_port()}", free_port()
        self._keys = folder / "keys"
        self._keys.write_text(f"tests:{hash_key(KEY)}\n")
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": int(self.dashboard.rpartition(":")[2])}
        self.cluster = FakeCluster([head, *WORKERS], environment=pod_environment(folder))

    def put(self, config: dict[str, Any]) -> None:
        """Raises httpx.HTTPStatusError."""
        answer = httpx.put(f"{self.dashboard}/api/serve/applications/", json=self._fit(config), timeout=60)
        answer.raise_for_status()

    def status(self) -> tuple[str, dict[str, int]]:
        """The application's status, and the number of running replicas of each deployment."""
        found = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=30).json()
        application = found["applications"]["manta"]
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        replicas = {
            name: sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
            for name, deployment in application["deployments"].items()
        }
        return application["status"], replicas

    def complete(self, model: str) -> httpx.Response:
        ask = {"model": model, "prompt": "An ocean is", "max_tokens": 8, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=ask, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def _fit(self, config: dict[str, Any]) -> dict[str, Any]:
        """For this machine: its ports, and a model and a file of keys that it has."""
        for application in config["applications"]:
            args = application["args"]
            for model in args["models"]:
                if model["model"] != "pocket":
                    model["model"] = "pocket"
                    del model["engine"]["max_model_len"]
            if "api_keys_file" in args["ingress"]:
                args["ingress"]["api_keys_file"] = str(self._keys)
        http_options = {"host": "127.0.0.1", "port": self.port}
        # all nodes would want the same port
        return {**config, "http_options": http_options, "proxy_location": "HeadOnly"}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="manta", dir="/tmp") as folder:  # socket paths must be short
        head = Head(Path(folder))
        try:
            yield head
        finally:
            head.cluster.stop()


def test_there_is_an_expectation_for_every_overlay():
    assert REPLICAS.keys() == {folder.name for folder in (K8S / "overlays").iterdir()}


@pytest.mark.parametrize("overlay", REPLICAS)
def test_serve_configuration_of_an_overlay_is_put_to_a_cluster_and_answers(head, overlay):
    config = yaml.safe_load((K8S / "overlays" / overlay / "serve_config.yaml").read_text())
    model = config["applications"][0]["args"]["models"][0]["name"]
    head.put(config)
    wait_until(lambda: head.status() == ("RUNNING", REPLICAS[overlay]), STARTUP_S)
    # HAProxy may know the replicas a little later, or still those of the overlay before
    wait_until(lambda: head.complete(model).status_code == 200)
    assert head.complete(model).json()["usage"]["completion_tokens"] > 0
