"""Rules of `manta k8s lint` that no schema covers. Each takes a RayService and yields violations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster import ray_serve_llm
from cluster.cli.lint import kuberay, serve
from cluster.cli.lint.manifests import Manifest, Service, read
from cluster.cli.lint.violation import Violation
from cluster.entry_point import BUILDERS
from engine.errors import StartupError

Rule = Callable[[Service], Iterator[Violation]]
RULES: tuple[Rule, ...] = (
    serve.serve_port, serve.proxies, serve.deadlines, serve.placement, serve.versions, kuberay.next_apply,
)  # fmt: skip


def read_service(path: Path) -> list[Manifest]:
    """Return the objects of a YAML file, or of a folder for kustomize. Raises StartupError if they cannot be read or
    have no RayService."""
    manifests = read(path)
    if not any(manifest["kind"] == "RayService" for manifest in manifests):
        raise StartupError(f"{path} has no RayService")
    return manifests


def violations(manifests: Sequence[Manifest], rules: Sequence[Rule] = RULES) -> list[Violation]:
    services = (Service(manifest, manifests) for manifest in manifests if manifest["kind"] == "RayService")
    return [violation for service in services for violation in _violations(service, rules)]


def _violations(service: Service, rules: Sequence[Rule]) -> Iterator[Violation]:
    builders = (*BUILDERS, *ray_serve_llm.BUILDERS)
    if not any(builder in (service.spec.get("serveConfigV2") or "") for builder in builders):
        paths = ray_serve_llm.OUR_PATHS
        message = f"is not a Manta service: no application has the import_path {paths}; nothing else was checked"
        yield Violation("not-manta", service.name, message)
        return
    try:
        _ = service.apps
    except StartupError as error:  # all other rules would fail with the same error
        yield Violation("broken-serve-config", service.name, str(error))
        return
    for rule in rules:
        yield from rule(service)
