"""Rules about network policies: what must be closed to pods of others, and what has to come through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cluster.cli.lint.manifests import Group, Manifest, Service
from cluster.cli.lint.violation import Violation
from cluster.server_ports import KNOWN_PORTS
from tests.k8s.rules.selectors import pod_labels, selects

CLOSED = {
    6379: "Ray's GCS",
    10001: "Ray's client",
    KNOWN_PORTS["RAY_SERVE_HAPROXY_STATS_PORT"].number: "HAProxy's stats",
}
DASHBOARD_PORT = 8265
REDIS_PORT = 6379
ANY_PORT = 40_000  # processes of Ray and engines listen on ports that the system chooses
DNS_PORTS = (53, 5353)  # the second is OpenShift's
API_SERVER_PORTS = (443, 6443, 8443)  # a policy cannot name the server, and 8443 is minikube's

Direction = Literal["Ingress", "Egress"]
VERBS: dict[Direction, str] = {"Ingress": "be reached by", "Egress": "reach"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a NetworkPolicy."""

    policy: str  #: its name
    spec: Manifest
    only_own: bool  #: whether all its peers are pods with the labels of all groups, in this namespace
    reaches_own: bool  #: whether one of its peers is all of those pods

    def opens(self, protocol: str, port: int) -> bool:
        """A port that is given by name counts as all, since names differ from pod to pod."""
        return any(
            entry.get("protocol", "TCP") == protocol
            and (not isinstance(entry.get("port"), int) or entry["port"] <= port <= entry.get("endPort", entry["port"]))
            for entry in self.spec.get("ports") or [{"protocol": protocol}]
        )


def open_ports(service: Service) -> Iterator[Violation]:
    """Ray's and HAProxy's ports must be closed to pods of others, who could run anything there."""
    for group in service.groups:
        rules = _rules(service, group, "Ingress")
        if rules is None:
            message = "no NetworkPolicy selects these pods, so all their ports are open to the whole cluster"
            yield Violation("open-ports", group.where, message)
        for rule in rules or []:
            ports = [f"{port} ({what})" for port, what in sorted(CLOSED.items()) if rule.opens("TCP", port)]
            if ports and not rule.only_own:
                message = f"NetworkPolicy {rule.policy} opens {', '.join(ports)} to pods of others"
                yield Violation("open-ports", group.where, message)


def cut_off(service: Service) -> Iterator[Violation]:
    """Pods that policies keep from what they need wait for ever, or are never told what to do."""
    for group in service.groups:
        for direction, verb in VERBS.items():
            rules = _rules(service, group, direction)
            if rules is not None and not any(rule.reaches_own and rule.opens("TCP", ANY_PORT) for rule in rules):
                message = f"no NetworkPolicy lets these pods {verb} the other pods of the cluster, on all ports"
                yield Violation("cut-off", group.where, message)
        for direction, what, protocol, ports in _needs(service, group):
            rules = _rules(service, group, direction)
            if rules is not None and not any(
                not rule.only_own and any(rule.opens(protocol, port) for port in ports) for rule in rules
            ):
                listed = " or ".join(map(str, ports))
                yield Violation("cut-off", group.where, f"no NetworkPolicy lets {what} ({protocol} {listed})")


def monitors(service: Service) -> Iterator[Violation]:
    """Prometheus finds ports by name, and any proxy answers `/metrics` for the whole cluster."""
    for monitor in service.of_kind("PodMonitor"):
        where, groups = f"PodMonitor {monitor['metadata']['name']}", _monitored(service, monitor)
        for endpoint in monitor["spec"].get("podMetricsEndpoints") or []:
            port = endpoint.get("port")
            scraped = [group for group in groups if port in group.ports]
            if groups and port and not scraped:
                yield Violation("monitors", where, f"no pod that it selects has a port {port!r}")
            pods = sum(service.max_pods(group) for group in scraped if group.ports[port] == service.port)
            if pods > 1:
                message = f"{port!r} of up to {pods} pods is asked, but each answers for all, so all counts are doubled"
                yield Violation("monitors", where, message)


def _needs(service: Service, group: Group) -> Iterator[tuple[Direction, str, str, tuple[int, ...]]]:
    """Yield direction, what a policy must let through, protocol, and ports of which one is enough."""
    yield "Egress", "these pods ask for names, so none finds the head", "UDP", DNS_PORTS
    if group.is_head:
        dashboard = int(group.start_params.get("dashboard-port", DASHBOARD_PORT))
        yield "Ingress", "the operator reach the dashboard, to deploy the Serve configuration", "TCP", (dashboard,)
        if service.autoscales:
            yield "Egress", "the autoscaler ask the API server for pods", "TCP", API_SERVER_PORTS
        if redis := redis_address(service):
            yield "Egress", "the GCS reach Redis", "TCP", (redis[1],)
    else:
        yield "Ingress", "clients reach the API", "TCP", (service.port,)
    for monitor in service.of_kind("PodMonitor"):
        for endpoint in monitor["spec"].get("podMetricsEndpoints") or []:
            if group in _monitored(service, monitor) and (port := group.ports.get(endpoint.get("port"))):
                yield "Ingress", f"Prometheus reach {endpoint['port']!r}", "TCP", (port,)


def redis_address(service: Service) -> tuple[str, int] | None:
    """Return host and port of Ray's control store, if that is a Redis."""
    address = (service.cluster.get("gcsFaultToleranceOptions") or {}).get("redisAddress")
    if address is None:
        return None
    host, _, port = address.split("://")[-1].partition(":")
    return host, int(port or REDIS_PORT)


def _monitored(service: Service, monitor: Manifest) -> list[Group]:
    return [group for group in service.groups if selects(monitor["spec"].get("selector"), pod_labels(group))]


def _rules(service: Service, group: Group, direction: Direction) -> list[Rule] | None:
    """Return the rules for one direction of a group's traffic; None if no policy selects it, so that all is open."""
    found, selected = [], False
    for policy in service.of_kind("NetworkPolicy"):
        spec = policy["spec"]
        kinds = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])
        if direction not in kinds or not selects(spec.get("podSelector"), pod_labels(group)):
            continue
        selected = True
        for rule in spec.get(direction.lower()) or []:
            peers: list[Any] = rule.get("from" if direction == "Ingress" else "to") or [{}]
            only_own = all(_is_own(peer, service) for peer in peers)
            found.append(Rule(policy["metadata"]["name"], rule, only_own, any(_has_own(p, service) for p in peers)))
    return found if selected else None


def _is_own(peer: Manifest, service: Service) -> bool:
    """Return whether a peer stands for pods of this namespace with labels that all groups have."""
    shared = set.intersection(*(set(pod_labels(group).items()) for group in service.groups))
    labels = ((peer.get("podSelector") or {}).get("matchLabels") or {}).items()
    return "namespaceSelector" not in peer and bool(labels) and labels <= shared


def _has_own(peer: Manifest, service: Service) -> bool:
    """Return whether all pods of this cluster are among those of a peer."""
    if not peer:
        return True
    namespace = {"kubernetes.io/metadata.name": service.metadata.get("namespace", "default")}
    here = "namespaceSelector" not in peer or selects(peer["namespaceSelector"], namespace)
    return (
        "ipBlock" not in peer and here and all(selects(peer.get("podSelector"), pod_labels(g)) for g in service.groups)
    )
