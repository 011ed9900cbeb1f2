"""Manifests without a fault, to break on purpose."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import yaml

from cluster.cli.lint.manifests import Manifest

OURS = {"part-of": "manta"}
GONE = object()


class Deployed:
    """One RayService with a head, a group for the ingress and a group with GPUs, and what stands around it."""

    def __init__(self) -> None:
        self.serve: Manifest = {
            "http_options": {"host": "0.0.0.0", "port": 8000},
            "applications": [
                {
                    "name": "manta",
                    "import_path": "manta:build",
                    "autoscaling_policy": {"policy_function": "manta:AutoscalingPolicy"},
                    "args": {
                        "models": [
                            {
                                "name": "m",
                                "model": "/models/m",
                                "engine": {"tensor_parallel_size": 2},
                                "decode": {
                                    "min_replicas": 1,
                                    "max_replicas": 2,
                                    "num_cpus": 2,
                                    "num_gpus": 1,
                                    "label_selector": {"pool": "decode"},
                                    "drain_s": 100,
                                },
                            }
                        ],
                        "ingress": {
                            "num_replicas": 2,
                            "num_cpus": 1,
                            "request_timeout_s": 100,
                            "drain_s": 100,
                            "api_keys_file": "/etc/keys/keys",
                        },
                    },
                    "deployments": [
                        {"name": "ingress", "ray_actor_options": {"num_cpus": 1, "label_selector": {"pool": "ingress"}}}
                    ],
                }
            ],
        }
        self.env = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "130",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "110",
        }
        self.head: Manifest = {
            "rayStartParams": {"num-cpus": "0"},
            "template": template("head", ports={"serve": 8000, "dashboard": 8265, "metrics": 8080}),
        }
        self.ingress = group("ingress", template("ingress"), replicas=2, maximum=2, cpus=2)
        self.decode = group("decode", template("decode", cpu=8, gpu=1), replicas=1, maximum=2, cpus=8, hosts=2)
        self.cluster: Manifest = {
            "rayVersion": version("ray"),
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": True,
            "headGroupSpec": self.head,
            "workerGroupSpecs": [self.ingress, self.decode],
        }
        self.spec: Manifest = {
            "upgradeStrategy": {"type": "NewCluster"},
            "rayClusterDeletionDelaySeconds": 120,
            "rayClusterConfig": self.cluster,
        }
        self.inside = policy(OURS, [{"podSelector": {"matchLabels": OURS}}])
        self.clients = policy(OURS, [{"namespaceSelector": {"matchLabels": {"clients": "yes"}}}], 8000)
        operator = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-system"}},
            "podSelector": {"matchLabels": {"app": "kuberay-operator"}},
        }
        self.operator = policy({"pool": "head"}, [operator], 8265)

    def manifests(self) -> list[Manifest]:
        service = self.spec | {"serveConfigV2": yaml.safe_dump(self.serve)}
        policies = {"inside": self.inside, "clients": self.clients, "operator": self.operator}
        return [
            {"kind": "RayService", "metadata": {"name": "manta"}, "spec": service},
            {"kind": "ConfigMap", "metadata": {"name": "ray-env"}, "data": self.env},
            *({"kind": "NetworkPolicy", "metadata": {"name": n}, "spec": spec} for n, spec in policies.items()),
        ]

    def put(self, path: str, value: Any) -> None:
        """path: names and indices with dots between them, the first being one of the above. GONE removes."""
        first, *middle, last = path.split(".")
        place = getattr(self, first)
        for step in middle:
            place = place[int(step) if isinstance(place, list) else step]
        if value is GONE:
            del place[last]
        else:
            place[int(last) if isinstance(place, list) else last] = value


def template(pool: str, *, cpu: int = 2, gpu: int = 0, ports: dict[str, int] | None = None) -> Manifest:
    memory_and_gpus = {"memory": "4Gi", **({"nvidia.com/gpu": str(gpu)} if gpu else {})}
    container = {
        "name": "ray",
        "image": "registry.example.com/manta:1",
        "envFrom": [{"configMapRef": {"name": "ray-env"}}],
        "ports": [
            {"name": n, "containerPort": port} for n, port in (ports or {"serve": 8000, "metrics": 8080}).items()
        ],
        "resources": {"requests": {"cpu": str(cpu), **memory_and_gpus}, "limits": dict(memory_and_gpus)},
    }
    spec = {
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
    }
    return {"metadata": {"labels": {**OURS, "pool": pool}}, "spec": spec}


def group(name: str, pods: Manifest, *, replicas: int, maximum: int, cpus: int, hosts: int = 1) -> Manifest:
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": maximum,
        "numOfHosts": hosts,
        "scaleStrategy": {},
        "labels": {"pool": name},
        "rayStartParams": {"num-cpus": str(cpus)},
        "template": pods,
    }


def policy(labels: dict[str, str], peers: list[Manifest], *ports: int) -> Manifest:
    rule: Manifest = {"from": peers} | ({"ports": [{"port": port} for port in ports]} if ports else {})
    return {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": [rule]}
