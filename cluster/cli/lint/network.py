"""Rules about who may reach the pods of a RayService."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.cli.lint.manifests import Group, Manifest, Service

DASHBOARD, CLOSED = 8265, {6379: "Ray's GCS", 10001: "Ray's client", 8404: "HAProxy's stats", 9101: "HAProxy's metrics"}
RUNS_CODE = "whoever reaches it may run anything"

Complaints = Iterator[tuple[str, str]]


def open_ports(service: Service, manifests: Sequence[Manifest]) -> Complaints:
    """Ray's and HAProxy's ports are for the pods of the cluster only, the dashboard also for the operator."""
    for group in service.groups:
        policies = [policy for policy in _policies(manifests, "Ingress") if _selects(policy, group)]
        if not policies:
            yield group.where, "no NetworkPolicy selects these pods, so all their ports are open to the whole cluster"
        for policy in policies:
            name = policy["metadata"]["name"]
            for rule in policy["spec"].get("ingress") or []:
                if _only_own_pods(rule, service):
                    continue
                ports = _ports(rule)
                if ports is None:
                    yield group.where, f"NetworkPolicy {name} opens all ports to pods of others"
                    continue
                for port in sorted(ports & CLOSED.keys()):
                    yield group.where, f"NetworkPolicy {name} opens {port} ({CLOSED[port]}) to pods of others"
                if DASHBOARD in ports and not _names_an_operator(rule):
                    yield group.where, f"NetworkPolicy {name} opens {DASHBOARD} to more than the operator: {RUNS_CODE}"


def unreachable(service: Service, manifests: Sequence[Manifest]) -> Complaints:
    """What must come through where policies close the rest."""
    needed = {service.head.where: (service.head, {DASHBOARD: "the operator, which deploys the Serve configuration,"})}
    needed |= {group.where: (group, {service.port: "clients"}) for group in service.workers}
    for where, (group, ports) in needed.items():
        policies = [policy for policy in _policies(manifests, "Ingress") if _selects(policy, group)]
        rules = [rule for policy in policies for rule in policy["spec"].get("ingress") or []]
        opened = [_ports(rule) for rule in rules if not _only_own_pods(rule, service)]
        for port, who in ports.items():
            if policies and not any(found is None or port in found for found in opened):
                yield where, f"no NetworkPolicy lets {who} reach port {port}"


def monitored_ports(service: Service, manifests: Sequence[Manifest]) -> Complaints:
    """Prometheus finds ports by name."""
    for monitor in manifests:
        if monitor["kind"] != "PodMonitor":
            continue
        labels = (monitor["spec"].get("selector") or {}).get("matchLabels") or {}
        groups = [group for group in service.groups if labels.items() <= group.labels.items()]
        names = {name for group in groups for name in group.ports}
        for endpoint in monitor["spec"].get("podMetricsEndpoints") or []:
            if endpoint.get("port") not in names:
                yield (
                    f"PodMonitor {monitor['metadata']['name']}",
                    f"no pod it selects has a port {endpoint.get('port')!r}",
                )


def _policies(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    policies = [m for m in manifests if m["kind"] == "NetworkPolicy"]
    return [policy for policy in policies if kind in (policy["spec"].get("policyTypes") or ["Ingress"])]


def _selects(policy: Manifest, group: Group) -> bool:
    labels: Mapping[str, str] = policy["spec"]["podSelector"].get("matchLabels") or {}
    given_by_operator = {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": "worker" if group.spec_.get("groupName") else "head",
    }
    return labels.items() <= {**group.labels, **given_by_operator}.items()


def _ports(rule: Mapping[str, Any]) -> set[int] | None:
    """None for all. A port that is given by name is not understood, and so counts as all."""
    given = rule.get("ports")
    if not given or not all(isinstance(entry.get("port"), int) for entry in given):
        return None
    return {port for entry in given for port in range(entry["port"], entry.get("endPort", entry["port"]) + 1)}


def _only_own_pods(rule: Mapping[str, Any], service: Service) -> bool:
    """Whether only pods of this namespace may come in that have the labels of all groups."""
    peers = rule.get("from") or [{}]
    shared = set.intersection(*(set(group.labels.items()) for group in service.groups))
    return all(
        "podSelector" in peer
        and "namespaceSelector" not in peer
        and (labels := (peer["podSelector"].get("matchLabels") or {}).items())
        and set(labels) <= shared | {("ray.io/is-ray-node", "yes")}
        for peer in peers
    )


def _names_an_operator(rule: Mapping[str, Any]) -> bool:
    peers = rule.get("from") or [{}]
    return all((peer.get("podSelector") or {}).get("matchLabels") and peer.get("namespaceSelector") for peer in peers)


RULES: dict[str, Callable[[Service, Sequence[Manifest]], Complaints]] = {
    "open-ports": open_ports,
    "unreachable": unreachable,
    "monitored-ports": monitored_ports,
}
