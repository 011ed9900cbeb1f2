"""The rules of `manta k8s lint`, which no schema knows: each takes a RayService and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.cli.lint import network, pods, serve
from cluster.cli.lint.finding import Finding
from cluster.cli.lint.manifests import Manifest, Service, read
from cluster.config import BUILDER
from engine.errors import StartupError

RULES: tuple[Callable[[Service], Iterator[Finding]], ...] = (
    serve.serve_port,
    serve.proxies,
    serve.deadlines,
    serve.placement,
    network.open_ports,
    network.cut_off,
    network.monitors,
    pods.refused,
    pods.head,
    pods.redis,
    pods.memory,
    pods.gpu_kind,
    pods.claims,
    pods.budgets,
)


def lint(path: Path) -> list[Finding]:
    """Check a YAML file, or a folder for kustomize. Raises StartupError if it cannot be read or has no RayService."""
    manifests = read(path)
    if not any(manifest["kind"] == "RayService" for manifest in manifests):
        raise StartupError(f"{path} has no RayService")
    return findings(manifests)


def findings(manifests: Sequence[Manifest]) -> list[Finding]:
    services = (Service(manifest, manifests) for manifest in manifests if manifest["kind"] == "RayService")
    return [finding for service in services for finding in _findings(service)]


def _findings(service: Service) -> Iterator[Finding]:
    if BUILDER not in (service.spec.get("serveConfigV2") or ""):
        message = f"is not a Manta service: no application has the import_path {BUILDER}; nothing else was checked"
        yield Finding("not-manta", service.name, message)
        return
    try:
        _ = service.apps
    except StartupError as error:  # the other rules would all stumble over it
        yield Finding("broken-serve-config", service.name, str(error))
        return
    for rule in RULES:
        yield from rule(service)
