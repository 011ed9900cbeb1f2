"""Manifests in the form that the rules use: the resources of each Ray pod, and the requirements of the Serve
configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from cluster import serve_config
from cluster.config.app_config import AppConfig
from cluster.entry_point import PORT
from engine.errors import ConfigError, StartupError
from placement.capacity import Node

Manifest = dict[str, Any]

RENDER_S = 60.0
UNITS = (
    {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
    | {unit: 1000.0**power for power, unit in enumerate("MGTPE", start=2)}
    | {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", start=1)}
)


def read(path: Path) -> list[Manifest]:
    """Return the objects of a YAML file, or of the output of kustomize for a folder. Raises StartupError."""
    try:
        found = [document for document in yaml.safe_load_all(_text(path)) if document]
    except yaml.YAMLError as error:
        raise StartupError(f"{path} is not YAML: {error}") from None
    if not found or not all(isinstance(document, dict) and "kind" in document for document in found):
        raise StartupError(f"{path} has no Kubernetes objects")
    return found


def kustomize() -> list[str] | None:
    """Return the command that renders a folder; None if this machine has none."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def _text(path: Path) -> str:
    if not path.is_dir():
        return path.read_text()
    if (command := kustomize()) is None:
        raise StartupError(f"{path} is a folder: rendering it needs kubectl or kustomize, and neither is installed")
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=RENDER_S)
    if done.returncode:
        raise StartupError(f"{path} cannot be rendered: {done.stderr.strip()}")
    return done.stdout


def quantity(value: Any, name: str) -> float:
    """Parse a Kubernetes quantity: `500m` cores, `16Gi` bytes, `1e10`. Raises ConfigError for `name`."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?([a-zA-Z]*)", str(value))
    if found is None or found[3] not in UNITS or (found[2] and found[3]):
        raise ConfigError(name, value, "a number with or without a unit, such as 8, 500m, 16Gi or 1e10")
    return float(found[1] + (found[2] or "")) * UNITS[found[3]]


@dataclass(frozen=True)
class Group:
    """The head or a worker group of a RayCluster."""

    where: str  #: name of the group in messages
    spec: Manifest
    config_maps: Mapping[str, Mapping[str, str]]

    @cached_property
    def pod(self) -> Manifest:
        return self.spec["template"]["spec"]

    @cached_property
    def main(self) -> Manifest:
        """Ray's container, the first one."""
        return self.pod["containers"][0]

    @property
    def is_head(self) -> bool:
        return "groupName" not in self.spec

    @property
    def start_params(self) -> Mapping[str, str]:
        return self.spec.get("rayStartParams") or {}

    @cached_property
    def ports(self) -> Mapping[str, int]:
        entries = [entry for container in self.pod["containers"] for entry in container.get("ports") or []]
        return {entry["name"]: entry["containerPort"] for entry in entries if "name" in entry}

    @cached_property
    def env(self) -> Mapping[str, str]:
        sources = [(source.get("configMapRef") or {}).get("name", "") for source in self.main.get("envFrom") or []]
        shared = {name: value for source in sources for name, value in self.config_maps.get(source, {}).items()}
        return shared | {entry["name"]: str(entry["value"]) for entry in self.main.get("env") or [] if "value" in entry}

    @property
    def node(self) -> Node:
        """One of the group's pods, as Ray sees it."""
        has, labels = self.main.get("resources") or {}, self.spec.get("labels") or {}
        has = {**(has.get("requests") or {}), **(has.get("limits") or {})}
        given = {**self.start_params, **(self.spec.get("resources") or {})}
        cpus = given.get("CPU", given.get("num-cpus", has.get("cpu", 0)))
        gpus = given.get("GPU", given.get("num-gpus", has.get("nvidia.com/gpu", 0)))
        kind = labels.get("ray.io/accelerator-type")
        card = {} if kind is None else {f"accelerator_type:{kind}": 1.0}
        resources = {"CPU": quantity(cpus, f"{self.where}: CPUs"), "GPU": quantity(gpus, f"{self.where}: GPUs")}
        return Node(resources | card, labels)


class Service:
    """A RayService, together with the manifests deployed with it."""

    def __init__(self, manifest: Manifest, manifests: Sequence[Manifest]):
        self.name = f"RayService {manifest['metadata']['name']}"
        self.metadata: Manifest = manifest["metadata"]
        self.spec: Manifest = manifest["spec"]
        self.cluster: Manifest = self.spec["rayClusterConfig"]
        self._manifests = manifests
        maps = {m["metadata"]["name"]: m.get("data") or {} for m in self.of_kind("ConfigMap")}
        specs = [("head", self.cluster["headGroupSpec"])]
        specs += [(f"group {spec['groupName']}", spec) for spec in self.cluster.get("workerGroupSpecs") or []]
        self.groups = [Group(f"{self.name}, {name}", spec, maps) for name, spec in specs]

    def of_kind(self, kind: str) -> Iterator[Manifest]:
        """Yield the manifests of a kind in the RayService's namespace, and those that specify no namespace."""
        namespace = self.metadata.get("namespace")
        for manifest in self._manifests:
            if manifest["kind"] == kind and manifest["metadata"].get("namespace", namespace) in (namespace, None):
                yield manifest

    @property
    def autoscales(self) -> bool:
        return bool(self.cluster.get("enableInTreeAutoscaling"))

    @cached_property
    def nodes(self) -> list[Node]:
        """Nodes that Ray sees if every group has its maximum number of pods."""
        return [group.node for group in self.groups for _ in range(self.max_pods(group))]

    def max_pods(self, group: Group) -> int:
        if group.is_head:
            return 1
        replicas = group.spec.get("maxReplicas" if self.autoscales else "replicas") or 0
        return int(replicas) * int(group.spec.get("numOfHosts", 1))

    @cached_property
    def serve(self) -> Manifest:
        """The Serve configuration. Raises StartupError."""
        return serve_config.parse(self.spec.get("serveConfigV2") or "", "serveConfigV2")

    @property
    def groups_with_streams(self) -> list[Group]:
        """Groups whose pods answer clients. The head is left out if it runs no replicas and is not an endpoint of the
        Service."""
        head_serves = self.groups[0].node.resources["CPU"] or not self.spec.get("excludeHeadPodFromServeSvc")
        return self.groups if head_serves else self.groups[1:]

    @property
    def port(self) -> int:
        return int((self.serve.get("http_options") or {}).get("port", PORT))

    @cached_property
    def apps(self) -> list[tuple[Manifest, AppConfig]]:
        """Manta's applications, raw and parsed. Raises StartupError."""
        found = []
        for i, app in serve_config.ours(self.serve):
            found.append((app, AppConfig.of(app)))
            serve_config.check_deployments(*found[-1], f"applications[{i}].deployments")
        return found
