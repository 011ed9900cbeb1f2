from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.lint.manifests import quantity, read
from cluster.cli.lint.rules import violations
from cluster.cli.main import app
from engine.errors import ConfigError, StartupError
from tests.cluster.cli.lint.good_manifests import GONE, Deployed

ARGS = "serve.applications.0.args"
DECODE = f"{ARGS}.models.0.decode"
CONTAINER = "template.spec.containers.0"


@dataclass(frozen=True)
class Fault:
    """A value that is put at a path, the rule that finds it, and its message."""

    rule: str
    path: str
    value: Any
    says: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.path.rsplit('.', 1)[-1]}"


FAULTS = [
    Fault("broken-serve-config", f"{ARGS}.ingress.num_replica", 2, "num_replicas"),
    Fault("broken-serve-config", "serve.applications.0.deployments.0.name", "ingres", "one of ingress, decode-m"),
    Fault("not-manta", "serve.applications", [], "is not a Manta service"),
    Fault("not-manta", "serve.applications.0.import_path", "other:build", "is not a Manta service"),
    Fault("serve-port", f"ingress.{CONTAINER}.ports.0.containerPort", 8001, "must be http_options.port (8000)"),
    Fault("bundles-fit", f"{DECODE}.num_cpus", 9, "no node has 9.1 CPU, at most 8"),
    Fault("bundles-fit", f"{DECODE}.label_selector", {"pool": "decod"}, "no node has the labels {pool: decod}"),
    Fault("bundles-fit", f"{DECODE}.placement_strategy", "STRICT_PACK", "only 1 of them fits on one node"),
    Fault("bundles-fit", "serve.applications.0.deployments.0.ray_actor_options.num_cpus", 3, "ingress: "),
    Fault("capacity", f"{DECODE}.max_replicas", 3, "may grow to 3 replicas, but the pods hold 2"),
    Fault("capacity", f"{ARGS}.ingress.num_replicas", 5, "may grow to 5 replicas, but the pods hold 4"),
    Fault("capacity", "cluster.enableInTreeAutoscaling", False, "may grow to 2 replicas, but the pods hold 1"),
    Fault("drain-grace", "decode.template.spec.terminationGracePeriodSeconds", 90, "at least the longest drain_s"),
    Fault("drain-grace", "env.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", GONE, "between the longest drain_s (100) and"),
    Fault("drain-requests", f"{DECODE}.drain_s", 60, "m.decode drain_s must be at least ingress.request_timeout_s"),
    Fault("haproxy-env", "env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "99", "at least request_timeout_s (100), got 99"),
    Fault("haproxy-env", "env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "2m", "at least request_timeout_s (100), got 0"),
    Fault("upgrade-cuts-requests", "spec.rayClusterDeletionDelaySeconds", GONE, "at least request_timeout_s (100)"),
]  # fmt: skip


def test_manifests_without_a_fault_have_no_violations():
    assert violations(Deployed().manifests()) == []


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_one_fault_is_found_by_its_rule_and_by_no_other(fault):
    deployed = Deployed()
    deployed.put(fault.path, fault.value)
    found = violations(deployed.manifests())
    assert {violation.rule for violation in found} == {fault.rule}
    assert fault.says in " ".join(map(str, found))


@pytest.mark.parametrize(
    ("ingress", "decode", "found"),
    [("1", "1", False), ("2", "2", False), ("1", "2", True), ("1", None, True), (None, "2", True), (None, None, True)],
)
def test_deployments_that_do_not_all_ask_for_one_version_are_found(ingress, decode, found):
    deployed = Deployed()
    for version in ("1", "2"):
        for group in (deployed.ingress, deployed.decode):
            labels = {**group["labels"], "manta/version": version}
            deployed.cluster["workerGroupSpecs"].append({**group, "groupName": "x", "labels": labels})
    del deployed.cluster["workerGroupSpecs"][:2]
    ask = f"{DECODE}.label_selector", "serve.applications.0.deployments.0.ray_actor_options.label_selector"
    for path, version in zip(ask, (decode, ingress), strict=True):
        if version is not None:
            deployed.put(f"{path}.manta/version", version)
    violations_ = violations(deployed.manifests())
    assert {violation.rule for violation in violations_} == ({"mixed-versions"} if found else set())
    if found:
        assert f"got ingress: {ingress or 'none'}, decode-m: {decode or 'none'}" in str(violations_[0])


def test_a_group_that_a_patch_left_without_a_maximum_is_found():
    deployed = Deployed()
    deployed.put("ingress.maxReplicas", GONE)
    found = {violation.rule: str(violation) for violation in violations(deployed.manifests())}
    assert "ingress" in found["bundles-fit"]  # there is no pod that could hold it


def test_a_head_that_answers_no_client_need_not_drain():
    deployed = Deployed()
    deployed.put("head.template.spec.terminationGracePeriodSeconds", 30)
    assert {violation.rule for violation in violations(deployed.manifests())} == {"drain-grace"}
    deployed.put("spec.excludeHeadPodFromServeSvc", True)
    assert violations(deployed.manifests()) == []
    deployed.put("head.rayStartParams.num-cpus", "1")  # for replicas
    assert {violation.rule for violation in violations(deployed.manifests())} == {"drain-grace"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", 0.5),
        ("8", 8),
        (2, 2),
        (0.5, 0.5),
        ("1e10", 1e10),
        ("1E3", 1e3),
        ("2P", 2e15),
        ("1E", 1e18),
        (".5Gi", 2**29),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text, number):
    assert quantity(text, "memory") == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "Gi", "1X", "1e3Gi", "-"])
def test_a_quantity_that_kubernetes_would_refuse_is_named(text):
    with pytest.raises(ConfigError, match="memory must be a number"):
        quantity(text, "memory")


def test_the_command_prints_each_violation_and_fails(tmp_path):
    deployed = Deployed()
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(deployed.manifests()))
    assert CliRunner().invoke(app, ["k8s", "lint", str(file)]).exit_code == 0
    deployed.put("serve.http_options.port", 9000)
    file.write_text(yaml.safe_dump_all(deployed.manifests()))
    result = CliRunner().invoke(app, ["k8s", "lint", str(file)])
    assert result.exit_code == 1
    assert "RayService manta, head: container port `serve` must be http_options.port (9000), got 8000" in result.stdout


@pytest.mark.parametrize("text", ["", "a: [", "a: 1"])
def test_a_file_without_objects_is_refused(tmp_path, text):
    file = tmp_path / "manifests.yaml"
    file.write_text(text)
    with pytest.raises(StartupError):
        read(file)
