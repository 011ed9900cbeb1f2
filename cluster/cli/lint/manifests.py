"""Kubernetes manifests as the rules read them: what each Ray pod has, and what its Serve configuration asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from cluster.config import BUILDER, PORT, AppConfig
from engine.errors import ConfigError, StartupError
from placement.capacity import Node

Manifest = dict[str, Any]

RENDER_S = 60.0
UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def read(path: Path) -> list[Manifest]:
    """The objects of a YAML file, or of what kustomize makes of a folder. Raises StartupError if there are none."""
    text = _render(path) if path.is_dir() else path.read_text()
    try:
        found = [document for document in yaml.safe_load_all(text) if document]
    except yaml.YAMLError as error:
        raise StartupError(f"{path} is not YAML: {error}") from None
    if not found or not all(isinstance(document, dict) and "kind" in document for document in found):
        raise StartupError(f"{path} has no Kubernetes objects")
    return found


def kustomize() -> list[str] | None:
    """The command that renders a folder, or None if this machine has none."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def _render(folder: Path) -> str:
    command = kustomize()
    if command is None:
        raise StartupError(
            f"{folder} is a folder: kubectl or kustomize is needed to render it, and neither is installed"
        )
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=RENDER_S)
    if done.returncode:
        raise StartupError(f"{folder} cannot be rendered: {done.stderr.strip()}")
    return done.stdout


def quantity(value: Any) -> float:
    """Kubernetes' `500m`, `8`, `16Gi` as a number. Raises ConfigError."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value))
    if found is None or found[2] not in UNITS:
        raise ConfigError("resources", value, f"a number with one of the units {', '.join(filter(None, UNITS))}")
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True)
class Pods:
    """A workload's pods. where: for messages. env: of the first container, with what its ConfigMaps say."""

    where: str
    template: Manifest
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template.get("spec") or {}
        return spec

    @property
    def containers(self) -> list[Manifest]:
        return [*(self.spec.get("initContainers") or []), *(self.spec.get("containers") or [])]

    @property
    def main(self) -> Manifest:
        """Ray's container, which is the first."""
        return next(iter(self.spec.get("containers") or []), {})

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = (self.template.get("metadata") or {}).get("labels") or {}
        return labels

    @property
    def ports(self) -> dict[str, int]:
        return {port.get("name", ""): port["containerPort"] for port in self.main.get("ports") or []}

    def resource(self, name: str, of: Sequence[str] = ("limits", "requests")) -> float:
        """Of the first container; 0 if it asks for none."""
        resources = self.main.get("resources") or {}
        return next((quantity(resources[kind][name]) for kind in of if name in (resources.get(kind) or {})), 0.0)

    @property
    def gpus(self) -> float:
        limits = (self.main.get("resources") or {}).get("limits") or {}
        return sum(quantity(value) for name, value in limits.items() if name.endswith("gpu"))


@dataclass(frozen=True)
class Group(Pods):
    """The head, or a worker group. spec_: as it stands in the RayCluster."""

    spec_: Manifest = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.spec_.get("groupName", "head"))

    @property
    def node(self) -> Node:
        """One of its pods, as Ray sees it."""
        params, given = self.spec_.get("rayStartParams") or {}, self.spec_.get("resources") or {}
        cpus = given.get("CPU", params.get("num-cpus", self.resource("cpu")))
        gpus = given.get("GPU", params.get("num-gpus", self.gpus))
        labels = dict(self.spec_.get("labels") or {})
        resources = {"CPU": quantity(cpus), "GPU": quantity(gpus)}
        if accelerator := labels.get("ray.io/accelerator-type"):
            resources[f"accelerator_type:{accelerator}"] = 1.0
        return Node(resources, labels)

    def most_pods(self, scales: bool) -> int:
        """scales: whether Ray's autoscaler may add pods."""
        if "groupName" not in self.spec_:
            return 1
        replicas = self.spec_.get("maxReplicas" if scales else "replicas")
        return int(replicas or 0) * int(self.spec_.get("numOfHosts", 1))


class Service:
    """A RayService."""

    def __init__(self, manifest: Manifest, others: Sequence[Manifest]):
        """others: all that is deployed with it."""
        self.name = f"RayService {manifest['metadata']['name']}"
        self.spec: Manifest = manifest["spec"]
        self.cluster: Manifest = self.spec.get("rayClusterConfig") or {}
        self.scales = bool(self.cluster.get("enableInTreeAutoscaling"))
        self._config_maps = {o["metadata"]["name"]: o.get("data") or {} for o in others if o["kind"] == "ConfigMap"}
        head = self._group("head", self.cluster.get("headGroupSpec") or {})
        workers = self.cluster.get("workerGroupSpecs") or []
        self.groups = [head, *(self._group(f"group {spec.get('groupName')}", spec) for spec in workers)]

    @property
    def head(self) -> Group:
        return self.groups[0]

    @property
    def workers(self) -> list[Group]:
        return self.groups[1:]

    def nodes(self) -> list[Node]:
        """All pods there may be, as Ray sees them."""
        return [group.node for group in self.groups for _ in range(group.most_pods(self.scales))]

    @cached_property
    def serve(self) -> Manifest:
        """The Serve configuration. Raises StartupError if it is none."""
        try:
            serve = yaml.safe_load(self.spec.get("serveConfigV2") or "")
        except yaml.YAMLError as error:
            raise StartupError(f"serveConfigV2 is not YAML: {error}") from None
        if not isinstance(serve, dict) or not serve.get("applications"):
            raise StartupError("serveConfigV2 has no applications")
        if not isinstance(serve["applications"], list) or not all(isinstance(a, dict) for a in serve["applications"]):
            raise StartupError("serveConfigV2.applications must be a list of sections")
        return serve

    @property
    def port(self) -> int:
        return int((self.serve.get("http_options") or {}).get("port", PORT))

    @cached_property
    def apps(self) -> list[tuple[Manifest, AppConfig]]:
        """Those of ours, as they stand and parsed. Raises StartupError."""
        ours = [app for app in self.serve["applications"] if app.get("import_path") == BUILDER]
        if not ours:
            raise StartupError(f"serveConfigV2 has no application with import_path {BUILDER}")
        return [(app, AppConfig.of(app)) for app in ours]

    def _group(self, where: str, spec: Manifest) -> Group:
        template = spec.get("template") or {}
        return Group(f"{self.name}, {where}", template, self._environment(template), spec)

    def _environment(self, template: Manifest) -> dict[str, str]:
        main: Manifest = next(iter((template.get("spec") or {}).get("containers") or []), {})
        env: dict[str, str] = {}
        for source in main.get("envFrom") or []:
            env |= self._config_maps.get((source.get("configMapRef") or {}).get("name"), {})
        return env | {entry["name"]: str(entry["value"]) for entry in main.get("env") or [] if "value" in entry}


def services(manifests: Sequence[Manifest]) -> list[Service]:
    return [Service(manifest, manifests) for manifest in manifests if manifest["kind"] == "RayService"]


def workloads(manifests: Sequence[Manifest]) -> Iterator[Pods]:
    """All pods that these manifests make."""
    for service in services(manifests):
        yield from service.groups
    for manifest in manifests:
        if manifest["kind"] in ("Job", "Deployment", "StatefulSet", "DaemonSet"):
            yield Pods(f"{manifest['kind']} {manifest['metadata']['name']}", manifest["spec"]["template"])
