"""The overlays, as kustomize renders them, and what stands in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.lint.manifests import Manifest, kustomize, read

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted((ROOT / "k8s" / "overlays").iterdir())

os.environ["PATH"] += os.pathsep + str(ROOT / "build" / "kubernetes")  # helm and kubectl, where `make test` puts them

needs_kustomize = pytest.mark.skipif(kustomize() is None, reason="neither kubectl nor kustomize is installed")
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm: make build/kubernetes/helm")
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)

GONE = object()


@cache
def rendered(overlay: Path) -> list[Manifest]:
    return read(overlay)


def of_kind(kind: str, manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def ray_service(manifests: list[Manifest]) -> Manifest:
    (service,) = of_kind("RayService", manifests)
    return service


def ray_groups(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The head and the worker groups, by their names."""
    cluster = ray_service(manifests)["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Pods of Ray, and of all that stands beside it."""
    yield from (group["template"]["spec"] for group in ray_groups(manifests).values())
    yield from (m["spec"]["template"]["spec"] for m in manifests if m["kind"] in ("Job", "Deployment", "StatefulSet"))


def containers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each container with its pod."""
    for pod in pods(manifests):
        yield from ((container, pod) for container in (*pod.get("initContainers", []), *pod["containers"]))


def put(place: Any, path: str, value: Any) -> None:
    """path: names and indices with dots between them. GONE removes."""
    *middle, last = path.split(".")
    for step in middle:
        place = place[int(step) if isinstance(place, list) else step]
    key = int(last) if isinstance(place, list) else last
    if value is GONE:
        del place[key]
    else:
        place[key] = value
