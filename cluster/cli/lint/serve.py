"""Rules about the Serve configuration and the pods that run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.cli.check.placement import deployments_of, place
from cluster.cli.lint.manifests import Service
from cluster.cli.lint.violation import Violation
from placement.capacity import missing

GRACE, RAY_DRAIN = "terminationGracePeriodSeconds", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
HARD_STOP, DELETION_DELAY = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "rayClusterDeletionDelaySeconds"
DEFAULTS_S = {GRACE: 30.0, RAY_DRAIN: 30.0, HARD_STOP: 120.0, DELETION_DELAY: 60.0}
EVERY_NODE = "EveryNode"
VERSION = "manta/version"  # label of nodes, where a cluster may have those of several versions


def serve_port(service: Service) -> Iterator[Violation]:
    for group in service.groups:
        if (opened := group.ports.get("serve")) != service.port:
            message = f"container port `serve` must be http_options.port ({service.port}), got {opened}"
            yield Violation("serve-port", group.where, message)


def proxies(service: Service) -> Iterator[Violation]:
    """Check that every worker has a proxy. KubeRay's readiness probe asks the proxy of each worker, so a worker without
    a proxy never becomes Ready."""
    if (location := service.serve.get("proxy_location", EVERY_NODE)) != EVERY_NODE:
        message = f"proxy_location must be {EVERY_NODE}, got {location}: no worker would ever be Ready"
        yield Violation("proxy-location", service.name, message)


def deadlines(service: Service) -> Iterator[Violation]:
    """Check that all deadlines for stopping are long enough for accepted requests to end."""
    drains_s = {f"{m.name}.{role}": p.drain_s for _, c in service.apps for m in c.models for role, p in m.pools.items()}
    drains_s |= {"ingress": max(config.ingress.drain_s for _, config in service.apps)}
    request_s, drain_s = max(config.ingress.request_timeout_s for _, config in service.apps), max(drains_s.values())
    request = f"request_timeout_s ({request_s:g})"
    for name, own_s in drains_s.items():
        if own_s < request_s:
            message = f"{name} drain_s must be at least ingress.{request}, got {own_s:g}"
            yield Violation("drain-requests", service.name, message)
    if (delay_s := _seconds(service.spec, DELETION_DELAY)) < request_s:
        message = f"{DELETION_DELAY} must be at least {request}, got {delay_s:g}"
        yield Violation("upgrade-cuts-requests", service.name, message)
    for group in service.groups_with_streams:
        grace_s, ray_s, stop_s = (
            _seconds(group.pod, GRACE), _seconds(group.env, RAY_DRAIN), _seconds(group.env, HARD_STOP)
        )  # fmt: skip
        if grace_s < drain_s:
            message = f"{GRACE} must be at least the longest drain_s ({drain_s:g}), got {grace_s:g}"
            yield Violation("drain-grace", group.where, message)
        if not drain_s <= ray_s <= grace_s:
            message = f"{RAY_DRAIN} must be between the longest drain_s ({drain_s:g}) and {GRACE} ({grace_s:g})"
            yield Violation("drain-grace", group.where, f"{message}, got {ray_s:g}")
        if stop_s < request_s:
            yield Violation("haproxy-env", group.where, f"{HARD_STOP} must be at least {request}, got {stop_s:g}")


def placement(service: Service) -> Iterator[Violation]:
    """Check that replicas fit the pods; otherwise Serve would wait forever."""
    deployments = [d for app, config in service.apps for d in deployments_of(config, app.get("deployments") or [])]
    wanted = {deployment.name: deployment.max_replicas for deployment in deployments}
    for deployment in deployments:
        if (problem := missing(deployment.spec, service.nodes)) is not None:
            del wanted[deployment.name]
            yield Violation("bundles-fit", service.name, f"{deployment.name}: {problem}")
    for name, placed in place(wanted, deployments, service.nodes).items():
        if placed < wanted[name]:
            message = f"{name} may grow to {wanted[name]} replicas, but the pods hold {placed} of them"
            yield Violation("capacity", service.name, message)


def versions(service: Service) -> Iterator[Violation]:
    """Check that all deployments ask for the same version, where nodes have one: Serve builds the application on a node
    that the ingress asks for, and all that one version has built must run on nodes of this version."""
    if not any(VERSION in group.node.labels for group in service.groups):
        return
    deployments = [d for app, config in service.apps for d in deployments_of(config, app.get("deployments") or [])]
    asked = {deployment.name: deployment.spec.label_selector.get(VERSION, "none") for deployment in deployments}
    if "none" in asked.values() or len({*asked.values()}) > 1:
        told = ", ".join(f"{name}: {version}" for name, version in asked.items())
        message = f"label_selector of all deployments must ask for one {VERSION}, as nodes have, got {told}"
        yield Violation("mixed-versions", service.name, message)


def _seconds(section: Any, name: str) -> float:
    try:
        return float(section.get(name, DEFAULTS_S[name]))
    except ValueError:
        return 0.0  # below every requirement
