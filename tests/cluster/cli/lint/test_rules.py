from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster import haproxy
from cluster.cli.lint import network, pods
from cluster.cli.lint.manifests import quantity, read
from cluster.cli.lint.rules import SERVICE_RULES, findings
from cluster.cli.main import app
from engine.errors import ConfigError, StartupError
from tests.cluster.cli.lint.good_manifests import GONE, Deployed

ALL_RULES = {*SERVICE_RULES, *network.RULES, *pods.RULES, "broken-serve-config"}
ARGS = "serve.applications.0.args"
DECODE = f"{ARGS}.models.0.decode"
CONTAINER = "template.spec.containers.0"
ANYBODY = [{"namespaceSelector": {}}]


@dataclass(frozen=True)
class Fault:
    """What is put where, which rule finds it, and what it says of it."""

    rule: str
    path: str
    value: Any
    says: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.path.rsplit('.', 1)[-1]}"


FAULTS = [
    Fault("broken-serve-config", f"{ARGS}.ingress.num_replica", 2, "num_replicas"),
    Fault("broken-serve-config", "serve.applications", [], "no applications"),
    Fault("broken-serve-config", "serve.applications", 5, "must be a list of sections"),
    Fault("broken-serve-config", "serve.applications.0.import_path", "other:build", "no application with import_path"),
    Fault("loopback-host", "serve.http_options.host", "127.0.0.1", "heard by nobody outside the pod"),
    Fault("loopback-host", "serve.http_options.host", "localhost", "heard by nobody outside the pod"),
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
    Fault("haproxy-env", "env.RAY_SERVE_ENABLE_HA_PROXY", GONE, "must be 1 on every node, got None"),
    Fault("haproxy-env", "env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "99", "at least request_timeout_s (100), got 99"),
    Fault("haproxy-env", "env.RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "2m", "at least request_timeout_s (100), got 0"),
    Fault("upgrade-cuts-requests", "spec.rayClusterDeletionDelaySeconds", GONE, "at least request_timeout_s (100)"),
    Fault("upgrade-strategy", "spec.upgradeStrategy.type", "Rolling", "must be one of NewCluster"),
    Fault("token-auth", "cluster.authOptions", GONE, "authOptions.mode must be token"),
    Fault("ray-version", "cluster.rayVersion", "2.9.0", "must be that of the image"),
    Fault("ray-version", f"decode.{CONTAINER}.image", "manta:2", "all Ray pods need one image"),
    Fault("group-sizes", "ingress.replicas", 3, "replicas must be between minReplicas (2) and maxReplicas (2)"),
    Fault("group-sizes", "head.rayStartParams.num-cpus", "1", "num-cpus must be 0"),
    Fault("missing-mounts", f"decode.{CONTAINER}.volumeMounts.1.mountPath", "/model", "where model of m is"),
    Fault("missing-mounts", f"head.{CONTAINER}.volumeMounts.2.mountPath", "/etc/key", "api_keys_file is"),
    Fault("open-ports", "clients.ingress.0.ports", [{"port": 8000}, {"port": 8404}], "opens 8404 (HAProxy's stats)"),
    Fault("open-ports", "clients.ingress.0.ports", [{"port": 8000, "endPort": 9200}], "opens 9101 (HAProxy's metrics)"),
    Fault("open-ports", "clients.ingress.0.ports", GONE, "opens all ports to pods of others"),
    Fault("open-ports", "inside.ingress.0.from.0.podSelector.matchLabels", {}, "opens all ports to pods of others"),
    Fault("open-ports", "operator.ingress.0.from", ANYBODY, "opens 8265 to more than the operator"),
    Fault("unreachable", "operator.ingress", [], "lets the operator, which deploys"),
    Fault("unreachable", "clients.ingress.0.ports", [{"port": 80}], "lets clients reach port 8000"),
    Fault("monitored-ports", "monitor.podMetricsEndpoints", [{"port": "metric"}], "no pod it selects has a port"),
    Fault("unpinned-image", f"job.{CONTAINER}.image", "manta", "must have a digest, or a tag"),
    Fault("unpinned-image", f"job.{CONTAINER}.image", "registry:5000/manta:latest", "must have a digest, or a tag"),
    Fault("restricted", "decode.template.spec.securityContext.runAsNonRoot", GONE, "runAsNonRoot must be True"),
    Fault("restricted", "decode.template.spec.securityContext.seccompProfile", GONE, "must be RuntimeDefault"),
    Fault("restricted", f"head.{CONTAINER}.securityContext.capabilities", {"drop": []}, "capabilities.drop must be"),
    Fault("restricted", f"job.{CONTAINER}.securityContext", {}, "readOnlyRootFilesystem must be True"),
    Fault("restricted", f"decode.{CONTAINER}.securityContext.capabilities.add", ["IPC_LOCK"], "must not have IPC_LOCK"),
    Fault("host-path", "ingress.template.spec.volumes.0", {"name": "x", "hostPath": {"path": "/x"}}, "refuses it"),
    Fault("tmp-volume", f"ingress.{CONTAINER}.volumeMounts.0.mountPath", "/t", "where Ray writes"),
    Fault("gpu-scheduling", "decode.template.spec.tolerations", [], "no toleration for nvidia.com/gpu"),
    Fault("gpu-scheduling", "decode.template.spec.nodeSelector", {}, "no nodeSelector"),
    Fault("ray-resources", "decode.rayStartParams.num-gpus", "2", "told of 2 GPUs, but the pod has 1"),
    Fault("ray-resources", f"decode.{CONTAINER}.resources.requests.cpu", "500m", "told of 8 CPUs"),
    Fault("memory", f"ingress.{CONTAINER}.resources.requests.memory", "1Gi", "must be the same"),
    Fault("secret-in-clear", f"head.{CONTAINER}.env", [{"name": "HF_TOKEN", "value": "x"}], "must come from a Secret"),
]  # fmt: skip


def test_manifests_without_a_fault_have_no_findings():
    assert findings(Deployed().manifests()) == []


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_one_fault_is_found_by_its_rule_and_by_no_other(fault):
    deployed = Deployed()
    deployed.put(fault.path, fault.value)
    found = findings(deployed.manifests())
    assert {finding.rule for finding in found} == {fault.rule}
    assert fault.says in " ".join(map(str, found))


def test_there_is_a_fault_for_every_rule():
    assert {fault.rule for fault in FAULTS} == ALL_RULES


def test_a_group_that_a_patch_left_without_a_maximum_is_found():
    deployed = Deployed()
    deployed.put("ingress.maxReplicas", GONE)
    found = {finding.rule: str(finding) for finding in findings(deployed.manifests())}
    assert "maxReplicas must be given" in found["group-sizes"]
    assert "ingress" in found["bundles-fit"]  # there is no pod that could hold it


def test_a_group_without_the_environment_of_the_others_is_found():
    deployed = Deployed()
    deployed.put(f"decode.{CONTAINER}.envFrom", [])
    found = [finding for finding in findings(deployed.manifests()) if finding.rule == "haproxy-env"]
    assert {finding.where for finding in found} == {"RayService manta, group decode"}
    assert len(found) == len(haproxy.FRONT)  # the default of its hard stop (120 s) is long enough for these requests


def test_an_incremental_upgrade_needs_its_options_and_the_autoscaler():
    deployed = Deployed()
    deployed.spec["upgradeStrategy"] = {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {"gatewayClassName": "g", "stepSizePercent": 30, "maxSurgePercent": 20},
    }
    deployed.decode["replicas"] = 2
    deployed.cluster["enableInTreeAutoscaling"] = False
    found = findings(deployed.manifests())
    assert [finding.rule for finding in found] == ["upgrade-strategy"] * 3
    said = " ".join(map(str, found))
    assert "intervalSeconds must be given" in said
    assert "enableInTreeAutoscaling must be true" in said
    assert "stepSizePercent must be at most maxSurgePercent (20), got 30" in said


def test_pods_that_no_policy_selects_are_open_to_all():
    deployed = Deployed()
    for name in ("inside", "clients", "operator"):
        deployed.put(f"{name}.podSelector.matchLabels", {"pool": "head"})
    found = findings(deployed.manifests())
    assert {(finding.rule, finding.where) for finding in found if "no NetworkPolicy selects" in str(finding)} == {
        ("open-ports", "RayService manta, group ingress"),
        ("open-ports", "RayService manta, group decode"),
    }


def test_pods_with_rdma_may_lock_memory():
    deployed = Deployed()
    deployed.put(f"decode.{CONTAINER}.securityContext.capabilities.add", ["IPC_LOCK"])
    deployed.put(f"decode.{CONTAINER}.resources.limits.rdma/ib", "1")
    assert findings(deployed.manifests()) == []


@pytest.mark.parametrize(("text", "number"), [("500m", 0.5), ("8", 8), (2, 2), ("16Gi", 2**34), ("1.5k", 1500)])
def test_quantities_are_read_as_kubernetes_writes_them(text, number):
    assert quantity(text) == number


def test_a_quantity_with_an_unknown_unit_is_refused():
    with pytest.raises(ConfigError, match="16GiB"):
        quantity("16GiB")


def test_the_command_prints_each_finding_and_fails(tmp_path):
    deployed = Deployed()
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(deployed.manifests()))
    assert CliRunner().invoke(app, ["k8s", "lint", str(file)]).exit_code == 0
    deployed.put("serve.http_options.host", "127.0.0.1")
    file.write_text(yaml.safe_dump_all(deployed.manifests()))
    result = CliRunner().invoke(app, ["k8s", "lint", str(file)])
    assert result.exit_code == 1
    assert "RayService manta: http_options.host 127.0.0.1" in result.stdout


@pytest.mark.parametrize("text", ["", "a: [", "a: 1"])
def test_a_file_without_objects_is_refused(tmp_path, text):
    file = tmp_path / "manifests.yaml"
    file.write_text(text)
    with pytest.raises(StartupError):
        read(file)
