"""What KubeRay's operator would change in a rendered object, and so own: the lint names it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from cluster.cli.lint.kuberay import WRITTEN, canonical
from cluster.cli.lint.manifests import Manifest
from cluster.cli.lint.rules import violations
from tests.cluster.cli.lint.good_manifests import Deployed

MEMORY: Manifest = {"resource": "limits.memory", "divisor": "0"}
CONTAINER: Manifest = {"name": "x", "resources": {}, "env": [{"name": "M", "valueFrom": {"resourceFieldRef": MEMORY}}]}
ITEMS: Manifest = {"items": [{"path": "memory", "resourceFieldRef": MEMORY}]}
EVERYTHING: Manifest = {  # a group that has each field of the table
    "scaleStrategy": {},
    "template": {
        "metadata": {},
        "spec": {
            "initContainers": [copy.deepcopy(CONTAINER)],
            "containers": [copy.deepcopy(CONTAINER)],
            "volumes": [
                {"name": "a", "downwardAPI": ITEMS},
                {"name": "b", "projected": {"sources": [{"downwardAPI": ITEMS}]}},
                {"name": "c", "ephemeral": {"volumeClaimTemplate": {"metadata": {}, "spec": {"resources": {}}}}},
            ],
        },
    },
}


def without(place: Any, steps: list[str]) -> Any:
    """Return a copy without the field at a path of the table."""
    step, *rest = steps
    if step == "*":
        return [without(item, rest) for item in place]
    if step not in place:
        return place
    if not rest:
        return {name: value for name, value in place.items() if name != step}
    return place | {step: without(place[step], rest)}


def put(place: Any, path: str, value: Any) -> None:
    *middle, last = path.split(".")
    for step in middle:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value


def found(group: Manifest) -> list[str]:
    deployed = Deployed()
    deployed.put("cluster.workerGroupSpecs.0", {"groupName": "ingress", **group})
    return [str(each) for each in violations(deployed.manifests()) if each.rule == "apply-conflict"]


def test_group_that_has_all_that_the_operator_writes_breaks_no_rule():
    assert found(EVERYTHING) == []


@pytest.mark.parametrize("field", WRITTEN)
def test_each_field_that_the_operator_writes_where_it_is_missing_is_named(field):
    group = without(EVERYTHING, field.split("."))
    assert group != EVERYTHING
    (violation,) = found(group)
    path = re.escape(field).replace(r"\*", r"\d")
    assert re.match(rf"RayService manta, group ingress: {path} must be {WRITTEN[field]}, as KubeRay", violation)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("template.spec.tolerations", []),
        ("template.spec.nodeSelector", {}),
        ("template.spec.hostNetwork", False),
        ("template.spec.containers.0.env.0.value", ""),
        ("labels", {}),
    ],
)
def test_field_that_the_operator_leaves_out_is_named(path, value):
    group = copy.deepcopy(EVERYTHING)
    put(group, path, value)
    (violation,) = found(group)
    assert f"group ingress: {path} must be left out, as KubeRay" in violation
    assert violation.endswith(f"got {value!r} (apply-conflict)")


def test_empty_values_that_the_operator_keeps_are_no_mistake():
    kept = {
        "rayStartParams": {},
        "labels": {"zone": ""},
        "template.spec.automountServiceAccountToken": False,
        "template.spec.containers.0.securityContext": {"allowPrivilegeEscalation": False},
        "template.spec.volumes.0.emptyDir": {},
    }
    group = copy.deepcopy(EVERYTHING)
    for path, value in kept.items():
        put(group, path, value)
    assert found(group) == []


@pytest.mark.parametrize(
    ("quantity", "written"),
    [
        ("1024Mi", "1Gi"),
        ("1536Mi", "1536Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5", "500m"),
        ("1500m", "1500m"),
        ("1000m", "1"),
        (4, "4"),
        ("1000", "1k"),
        ("0.1Ki", "102400m"),
        ("0", "0"),
        ("1e9", "1e9"),
    ],
)
def test_quantity_is_written_as_kubernetes_writes_it(quantity, written):
    assert canonical(quantity) == written


@pytest.mark.parametrize(("path", "value"), [("requests.memory", "4096Mi"), ("requests.cpu", 2), ("limits.cpu", "2.5")])
def test_quantity_that_the_operator_writes_in_another_form_is_named(path, value):
    kind, name = path.split(".")
    deployed = Deployed()
    deployed.head["template"]["spec"]["containers"][0]["resources"][kind][name] = value
    (violation,) = violations(deployed.manifests())
    says = f'rayClusterConfig.headGroupSpec.template.spec.containers.0.resources.{path} must be "{canonical(value)}"'
    assert violation.rule == "apply-conflict"
    assert says in str(violation)
    assert f"got {value!r}" in str(violation)
