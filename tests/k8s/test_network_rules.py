"""Rules about network policies, on manifests that break one of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.cli.lint.good_manifests import GONE, Deployed
from tests.k8s.rules.every_rule import violations
from tests.k8s.rules.selectors import selects

OPENED: list[tuple[str, Any, str]] = [
    ("clients.ingress.0.ports", [{"port": 8000}, {"port": 8404}], "opens 8404 (HAProxy's stats)"),
    ("clients.ingress.0.ports", [{"port": 8000, "endPort": 9200}], "opens 8404 (HAProxy's stats)"),
    ("clients.ingress.0.ports", GONE, "6379 (Ray's GCS), 8404 (HAProxy's stats), 10001"),
    ("inside.ingress.0.from.0.podSelector.matchLabels", {}, "opens 6379 (Ray's GCS)"),
]  # fmt: skip


def test_manifests_without_a_fault_break_no_rule():
    assert violations(Deployed().manifests()) == []


@pytest.mark.parametrize(("path", "value", "says"), OPENED)
def test_a_policy_that_opens_ports_of_ray_or_haproxy_to_others_is_found_by_one_rule(path, value, says):
    deployed = Deployed()
    deployed.put(path, value)
    found = violations(deployed.manifests())
    assert {violation.rule for violation in found} == {"open-ports"}
    assert says in " ".join(map(str, found))


def test_pods_that_no_policy_selects_are_open_to_all():
    deployed = Deployed()
    for name in ("inside", "clients", "operator"):
        deployed.put(f"{name}.podSelector.matchLabels", {"pool": "head"})
    found = violations(deployed.manifests())
    assert {(each.rule, each.where) for each in found if "no NetworkPolicy selects" in str(each)} == {
        ("open-ports", "RayService manta, group ingress"),
        ("open-ports", "RayService manta, group decode"),
    }


def test_manifests_of_other_namespaces_and_monitors_of_other_pods_do_not_count():
    service, *others = Deployed().manifests()
    service["metadata"]["namespace"] = "manta"
    monitor = {"selector": {"matchLabels": {"app": "other"}}, "podMetricsEndpoints": [{"port": "http"}]}
    others += [
        {"kind": "PodMonitor", "metadata": {"name": "other"}, "spec": monitor},
        {
            "kind": "NetworkPolicy",
            "metadata": {"name": "other", "namespace": "other"},
            "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
        },
    ]
    assert violations([service, *others]) == []
    del others[-1]["metadata"]["namespace"]
    assert {violation.rule for violation in violations([service, *others])} == {"cut-off"}


@pytest.mark.parametrize(
    ("operator", "values", "selected"),
    [
        ("In", ["a"], True),
        ("In", ["b"], False),
        ("NotIn", ["a"], False),
        ("NotIn", ["b"], True),
        ("Exists", None, True),
        ("DoesNotExist", None, False),
    ],
)
def test_selectors_are_read_as_kubernetes_reads_them(operator, values, selected):
    expression = {"key": "pool", "operator": operator} | ({"values": values} if values else {})
    assert selects({"matchExpressions": [expression]}, {"pool": "a"}) == selected
    assert not selects({"matchLabels": {"x": "y"}, "matchExpressions": [expression]}, {"pool": "a"})
    assert selects(None, {"pool": "a"})
