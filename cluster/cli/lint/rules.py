"""All rules, and those about how the Serve configuration, the pods and KubeRay's own settings agree.

A rule is a function from what is deployed to complaints.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cluster import haproxy
from cluster.cli.lint import network, pods
from cluster.cli.lint.manifests import Manifest, Service, read, services, workloads
from cluster.cli.lint.placement import bundles_that_fit_no_pod, more_replicas_than_pods_can_hold
from engine.errors import StartupError

RAY_DRAIN_S = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
HARD_STOP_S = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
DEFAULT_GRACE_S, DEFAULT_RAY_DRAIN_S, DEFAULT_HARD_STOP_S, DEFAULT_DELETION_DELAY_S = 30.0, 30.0, 120.0, 60.0

Complaints = Iterator[tuple[str, str]]  # where, what


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem} ({self.rule})"


def lint(path: Path) -> list[Finding]:
    """path: a YAML file or a folder for kustomize. Raises StartupError if it cannot be read or has no RayService."""
    manifests = read(path)
    if not services(manifests):
        raise StartupError(f"{path} has no RayService")
    return findings(manifests)


def findings(manifests: Sequence[Manifest]) -> list[Finding]:
    found = []
    for service in services(manifests):
        try:
            _ = service.apps
        except StartupError as error:  # the other rules would all stumble over it
            found.append(Finding("broken-serve-config", service.name, str(error)))
            continue
        for name, rule in SERVICE_RULES.items():
            found += [Finding(name, *complaint) for complaint in rule(service)]
        for name, network_rule in network.RULES.items():
            found += [Finding(name, *complaint) for complaint in network_rule(service, manifests)]
    for workload in workloads(manifests):
        for name, pod_rule in pods.RULES.items():
            found += [Finding(name, workload.where, problem) for problem in pod_rule(workload)]
    return found


def longest_request_s(service: Service) -> float:
    return max(config.ingress.request_timeout_s for _, config in service.apps)


def longest_drain_s(service: Service) -> float:
    drains = [config.ingress.drain_s for _, config in service.apps]
    return max(drains + [p.drain_s for _, c in service.apps for model in c.models for p in model.pools.values()])


def loopback_host(service: Service) -> Complaints:
    host = (service.serve.get("http_options") or {}).get("host", "0.0.0.0")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback:
        yield service.name, f"http_options.host {host} is heard by nobody outside the pod; give 0.0.0.0"


def serve_port(service: Service) -> Complaints:
    for group in service.groups:
        port = group.ports.get("serve")
        if port != service.port:
            yield group.where, f"container port `serve` must be http_options.port ({service.port}), got {port}"


def drain_longer_than_grace(service: Service) -> Complaints:
    drain_s = longest_drain_s(service)
    for group in service.groups:
        grace_s = float(group.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        ray_s = _seconds(group.env, RAY_DRAIN_S, DEFAULT_RAY_DRAIN_S)
        if grace_s < drain_s:
            limit = f"at least the longest drain_s ({drain_s:g})"
            yield group.where, f"terminationGracePeriodSeconds must be {limit}, got {grace_s:g}"
        if not drain_s <= ray_s <= grace_s:
            limit = f"between the longest drain_s ({drain_s:g}) and terminationGracePeriodSeconds ({grace_s:g})"
            yield group.where, f"{RAY_DRAIN_S} must be {limit}, got {ray_s:g}"


def drain_shorter_than_requests(service: Service) -> Complaints:
    for app, config in service.apps:
        pools = {f"{m.name}.{role}": pool.drain_s for m in config.models for role, pool in m.pools.items()}
        for name, drain_s in {"ingress": config.ingress.drain_s, **pools}.items():
            if drain_s < config.ingress.request_timeout_s:
                limit = f"at least ingress.request_timeout_s ({config.ingress.request_timeout_s:g})"
                yield f"{service.name}, application {app['name']}", f"{name} drain_s must be {limit}, got {drain_s:g}"


def haproxy_environment(service: Service) -> Complaints:
    longest_s = longest_request_s(service)
    for group in service.groups:
        for name, value in haproxy.FRONT.items():
            if group.env.get(name) != value:
                yield group.where, f"{name} must be {value} on every node, got {group.env.get(name)}"
        stop_s = _seconds(group.env, HARD_STOP_S, DEFAULT_HARD_STOP_S)
        if stop_s < longest_s:
            yield group.where, f"{HARD_STOP_S} must be at least request_timeout_s ({longest_s:g}), got {stop_s:g}"


def upgrade_cuts_requests(service: Service) -> Complaints:
    longest_s = longest_request_s(service)
    delay_s = float(service.spec.get("rayClusterDeletionDelaySeconds", DEFAULT_DELETION_DELAY_S))
    if delay_s < longest_s:
        limit = f"at least request_timeout_s ({longest_s:g})"
        yield service.name, f"rayClusterDeletionDelaySeconds must be {limit}, got {delay_s:g}"


def upgrade_strategy(service: Service) -> Complaints:
    strategy = service.spec.get("upgradeStrategy") or {}
    kind, options = strategy.get("type", UPGRADES[0]), strategy.get("clusterUpgradeOptions") or {}
    if kind not in UPGRADES:
        yield service.name, f"upgradeStrategy.type must be one of {', '.join(UPGRADES)}, got {kind!r}"
    elif kind == UPGRADES[1]:
        for key in ("gatewayClassName", "stepSizePercent", "intervalSeconds"):
            if key not in options:
                yield service.name, f"upgradeStrategy.clusterUpgradeOptions.{key} must be given for {kind}"
        if not service.scales:
            yield service.name, f"enableInTreeAutoscaling must be true for {kind}"
        step, surge = options.get("stepSizePercent", 0), options.get("maxSurgePercent", 100)
        if step > surge:
            yield service.name, f"stepSizePercent must be at most maxSurgePercent ({surge}), got {step}"


def token_auth(service: Service) -> Complaints:
    mode = (service.cluster.get("authOptions") or {}).get("mode")
    if mode != "token":
        yield service.name, f"authOptions.mode must be token: whoever reaches Ray's ports may run anything, got {mode}"


def ray_version(service: Service) -> Complaints:
    wanted, got = version("ray"), service.cluster.get("rayVersion")
    if got != wanted:
        yield service.name, f"rayVersion must be that of the image ({wanted}), got {got}"
    images = {group.main.get("image") for group in service.groups}
    if len(images) > 1:
        yield service.name, f"all Ray pods need one image, got {', '.join(map(str, sorted(images, key=str)))}"


def group_sizes(service: Service) -> Complaints:
    for group in service.workers:
        low, high = group.spec_.get("minReplicas", 0), group.spec_.get("maxReplicas")
        if high is None:
            yield group.where, "maxReplicas must be given; a patch that replaces the list of groups loses it"
        elif not low <= group.spec_.get("replicas", low) <= high:
            got = group.spec_.get("replicas")
            yield group.where, f"replicas must be between minReplicas ({low}) and maxReplicas ({high}), got {got}"
    cpus = service.head.node.resources["CPU"]
    if cpus:
        yield (
            service.head.where,
            f"num-cpus must be 0, so that no replica lives beside Ray's own services, got {cpus:g}",
        )


def missing_mounts(service: Service) -> Complaints:
    """Model folders and the file of API keys must be in every pod: the head builds the application."""
    for _, config in service.apps:
        paths = {f"model of {m.name}": m.model for m in config.models if m.model.startswith("/")}
        if config.ingress.api_keys_file:
            paths["api_keys_file"] = config.ingress.api_keys_file
        for group in service.groups:
            mounts = [Path(mount["mountPath"]) for mount in group.main.get("volumeMounts") or []]
            for what, path in paths.items():
                if not any(mount in (Path(path), *Path(path).parents) for mount in mounts):
                    yield group.where, f"no volume is mounted where {what} is ({path})"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, default))
    except ValueError:
        return 0.0  # less than anything asks for


SERVICE_RULES: dict[str, Callable[[Service], Complaints]] = {
    "loopback-host": loopback_host,
    "serve-port": serve_port,
    "bundles-fit": bundles_that_fit_no_pod,
    "capacity": more_replicas_than_pods_can_hold,
    "drain-grace": drain_longer_than_grace,
    "drain-requests": drain_shorter_than_requests,
    "haproxy-env": haproxy_environment,
    "upgrade-cuts-requests": upgrade_cuts_requests,
    "upgrade-strategy": upgrade_strategy,
    "token-auth": token_auth,
    "ray-version": ray_version,
    "group-sizes": group_sizes,
    "missing-mounts": missing_mounts,
}
