"""The rules of `manta k8s lint`, which no schema knows: each takes a RayService and yields findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import haproxy
from cluster.cli.check.placement import deployments_of, place
from cluster.cli.lint.manifests import Group, Manifest, Service, read
from engine.errors import StartupError
from placement.capacity import missing

GRACE, RAY_DRAIN = "terminationGracePeriodSeconds", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
HARD_STOP, DELETION_DELAY = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "rayClusterDeletionDelaySeconds"
DEFAULTS_S = {GRACE: 30.0, RAY_DRAIN: 30.0, HARD_STOP: 120.0, DELETION_DELAY: 60.0}
STATS_PORT, METRICS_PORT = haproxy.OWN_PORTS.values()
CLOSED = {6379: "Ray's GCS", 10001: "Ray's client", STATS_PORT: "HAProxy's stats", METRICS_PORT: "HAProxy's metrics"}


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem} ({self.rule})"


def lint(path: Path) -> list[Finding]:
    """Check a YAML file, or a folder for kustomize. Raises StartupError if it cannot be read or has no RayService."""
    manifests = read(path)
    if not any(manifest["kind"] == "RayService" for manifest in manifests):
        raise StartupError(f"{path} has no RayService")
    return findings(manifests)


def findings(manifests: Sequence[Manifest]) -> list[Finding]:
    found = []
    for service in [Service(manifest, manifests) for manifest in manifests if manifest["kind"] == "RayService"]:
        try:
            _ = service.apps
        except StartupError as error:  # the other rules would all stumble over it
            found.append(Finding("broken-serve-config", service.name, str(error)))
            continue
        for rule in (serve_port, deadlines, placement, open_ports):
            found += rule(service)
    return found


def serve_port(service: Service) -> Iterator[Finding]:
    for group in service.groups:
        opened = {entry.get("name"): entry["containerPort"] for entry in group.main.get("ports") or []}.get("serve")
        if opened != service.port:
            message = f"container port `serve` must be http_options.port ({service.port}), got {opened}"
            yield Finding("serve-port", group.where, message)


def deadlines(service: Service) -> Iterator[Finding]:
    """Everything that stops must outlive the requests that it has accepted."""
    drains_s = {f"{m.name}.{role}": p.drain_s for _, c in service.apps for m in c.models for role, p in m.pools.items()}
    drains_s |= {"ingress": max(config.ingress.drain_s for _, config in service.apps)}
    request_s, drain_s = max(config.ingress.request_timeout_s for _, config in service.apps), max(drains_s.values())
    request = f"request_timeout_s ({request_s:g})"
    for name, own_s in drains_s.items():
        if own_s < request_s:
            message = f"{name} drain_s must be at least ingress.{request}, got {own_s:g}"
            yield Finding("drain-requests", service.name, message)
    if (delay_s := _seconds(service.spec, DELETION_DELAY)) < request_s:
        message = f"{DELETION_DELAY} must be at least {request}, got {delay_s:g}"
        yield Finding("upgrade-cuts-requests", service.name, message)
    for group in service.groups_with_streams:
        grace_s, ray_s, stop_s = (
            _seconds(group.pod, GRACE), _seconds(group.env, RAY_DRAIN), _seconds(group.env, HARD_STOP)
        )  # fmt: skip
        if grace_s < drain_s:
            message = f"{GRACE} must be at least the longest drain_s ({drain_s:g}), got {grace_s:g}"
            yield Finding("drain-grace", group.where, message)
        if not drain_s <= ray_s <= grace_s:
            message = f"{RAY_DRAIN} must be between the longest drain_s ({drain_s:g}) and {GRACE} ({grace_s:g})"
            yield Finding("drain-grace", group.where, f"{message}, got {ray_s:g}")
        if stop_s < request_s:
            yield Finding("haproxy-env", group.where, f"{HARD_STOP} must be at least {request}, got {stop_s:g}")


def placement(service: Service) -> Iterator[Finding]:
    """Replicas must fit the pods: Serve would wait for ever for one that does not come."""
    deployments = [d for app, config in service.apps for d in deployments_of(config, app.get("deployments") or [])]
    wanted = {deployment.name: deployment.max_replicas for deployment in deployments}
    for deployment in deployments:
        if (problem := missing(deployment.spec, service.nodes)) is not None:
            del wanted[deployment.name]
            yield Finding("bundles-fit", service.name, f"{deployment.name}: {problem}")
    for name, placed in place(wanted, deployments, service.nodes).items():
        if placed < wanted[name]:
            message = f"{name} may grow to {wanted[name]} replicas, but the pods hold {placed} of them"
            yield Finding("capacity", service.name, message)


def open_ports(service: Service) -> Iterator[Finding]:
    """Ray's and HAProxy's ports must be closed to pods of others, who could run anything there."""
    for group in service.groups:
        policies = [policy for policy in service.policies if _selects(policy, group)]
        if not policies:
            message = "no NetworkPolicy selects these pods, so all their ports are open to the whole cluster"
            yield Finding("open-ports", group.where, message)
        for policy in policies:
            for rule in policy["spec"].get("ingress") or []:
                ports = [] if all(_is_own(peer, service) for peer in rule.get("from") or [{}]) else _closed_ports(rule)
                if ports:
                    opened = ", ".join(f"{port} ({CLOSED[port]})" for port in ports)
                    message = f"NetworkPolicy {policy['metadata']['name']} opens {opened} to pods of others"
                    yield Finding("open-ports", group.where, message)


def _selects(policy: Manifest, group: Group) -> bool:
    kinds = policy["spec"].get("policyTypes") or ["Ingress"]
    return "Ingress" in kinds and _labels(policy["spec"].get("podSelector")) <= group.labels.items()


def _is_own(peer: Manifest, service: Service) -> bool:
    """Whether a peer of a policy stands for pods of this namespace with the labels of all groups."""
    shared = set.intersection(*(set(group.labels.items()) for group in service.groups))
    labels = _labels(peer.get("podSelector"))
    return "namespaceSelector" not in peer and bool(labels) and labels <= shared


def _labels(selector: Manifest | None) -> Any:
    return ((selector or {}).get("matchLabels") or {}).items()


def _closed_ports(rule: Manifest) -> list[int]:
    """Return the ports that a rule opens and should not. A port that is given by name counts as all."""
    given = rule.get("ports") or [{}]
    if not all(isinstance(entry.get("port"), int) for entry in given):
        return sorted(CLOSED)
    return [port for port in CLOSED if any(e["port"] <= port <= e.get("endPort", e["port"]) for e in given)]


def _seconds(section: Any, name: str) -> float:
    try:
        return float(section.get(name, DEFAULTS_S[name]))
    except ValueError:
        return 0.0  # less than anything asks for
