"""A Ray cluster of fake nodes to which configurations of Kubernetes overlays are put by REST, as KubeRay does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from deployments.frontend.api_keys import hash_key
from tests.serve.fake_cluster import FakeCluster
from tests.serve.pod_environment import pod_environment
from tests.serve.serve_run import free_port

KEY = "sk-of-a-test"


class Head:
    """What the KubeRay operator sees of a Ray cluster.

    Where a model would have to be downloaded, the bundled one is served instead, with its own context length; all else
    of a configuration is as it stands.
    """

    def __init__(self, folder: Path, workers: list[dict[str, Any]], labels: dict[str, str] | None = None):
        """workers: arguments of Cluster.add_node. labels: of the head."""
        self.dashboard, self.port = f"http://127.0.0.1:{free_port()}", free_port()
        self._keys = folder / "keys"
        self._keys.write_text(f"tests:{hash_key(KEY)}\n")
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": int(self.dashboard.rpartition(":")[2])}
        self.cluster = FakeCluster([head | {"labels": labels or {}}, *workers], environment=pod_environment(folder))

    def put(self, config: dict[str, Any]) -> None:
        """Raises httpx.HTTPStatusError."""
        answer = httpx.put(f"{self.dashboard}/api/serve/applications/", json=self._fit(config), timeout=60)
        answer.raise_for_status()

    def status(self) -> tuple[str, dict[str, int]]:
        """The application's status, and the number of running replicas of each deployment."""
        status, deployments = self._application()
        running = {name: sum(one["state"] == "RUNNING" for one in replicas) for name, replicas in deployments.items()}
        return status, running

    def labels(self, label: str) -> dict[str, list[str]]:
        """What a label says of the nodes on which the replicas of each deployment are, stopping ones too."""
        _, deployments = self._application()
        return {
            name: [
                self.cluster.labels(replica["node_id"]).get(label, "") for replica in replicas if "node_id" in replica
            ]
            for name, replicas in deployments.items()
        }

    def complete(self, model: str) -> httpx.Response:
        ask = {"model": model, "prompt": "An ocean is", "max_tokens": 8, "temperature": 0}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=ask, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def _application(self) -> tuple[str, dict[str, list[dict[str, Any]]]]:
        found = httpx.get(f"{self.dashboard}/api/serve/applications/", timeout=30).json()
        application = found["applications"]["manta"]
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        return application["status"], {
            name: deployment["replicas"] for name, deployment in application["deployments"].items()
        }

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
