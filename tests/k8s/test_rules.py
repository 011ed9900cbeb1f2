"""One mistake in a shipped overlay, which schemas, Pod Security and the API server let pass, is found by a rule."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from cluster.cli.lint import kuberay
from cluster.cli.lint.manifests import Manifest
from tests.k8s import crds
from tests.k8s.overlays import GONE, ROOT, needs_kustomize, put, rendered
from tests.k8s.rules.every_rule import violations

HEAD = "rayClusterConfig.headGroupSpec"
INGRESS, PREFILL, DECODE = (f"rayClusterConfig.workerGroupSpecs.{i}" for i in range(3))
POD, MAIN = "template.spec", "template.spec.containers.0"
REDIS = "rayClusterConfig.gcsFaultToleranceOptions"

pytestmark = needs_kustomize


@dataclass(frozen=True)
class Variant:
    """pd-disagg, with another value at a path below `spec` of one object."""

    rule: str
    object: str  #: kind and name
    path: str
    value: Any
    says: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.object.rpartition('/')[2]}.{self.path.rpartition('.')[2]}"

    def manifests(self) -> list[Manifest]:
        manifests = copy.deepcopy(rendered(ROOT / "k8s" / "overlays" / "pd-disagg"))
        if self.path == "":  # the object itself
            return [manifest for manifest in manifests if name_of(manifest) != self.object]
        (manifest,) = [manifest for manifest in manifests if name_of(manifest) == self.object]
        put(manifest if self.path.startswith("metadata") else manifest["spec"], self.path, self.value)
        return manifests


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def of_ray(rule: str, path: str, value: Any, says: str) -> Variant:
    return Variant(rule, "RayService/manta", path, value, says)


def closed(policy: str, path: str, value: Any, says: str) -> Variant:
    return Variant("cut-off", f"NetworkPolicy/manta-{policy}", path, value, says)


def from_elsewhere(name: str, port: int) -> Manifest:
    return {"from": [{"namespaceSelector": {"matchLabels": {name: "yes"}}}], "ports": [{"port": port}]}


VARIANTS = [
    closed("intra-cluster", "egress.0", GONE, "lets these pods reach the other pods of the cluster"),
    closed("intra-cluster", "egress.0.ports", [{"port": 6379}], "lets these pods reach the other pods of the cluster"),
    closed("intra-cluster", "egress.0.to.0.podSelector.matchLabels", {"manta/pool": "head"}, "reach the other pods"),
    closed("intra-cluster", "ingress", [], "lets these pods be reached by the other pods of the cluster"),
    closed("intra-cluster", "egress.1", GONE, "ask for names, so none finds the head (UDP 53 or 5353)"),
    closed("autoscaler", "egress", [], "lets the autoscaler ask the API server for pods"),
    closed("to-redis", "egress", [], "lets the GCS reach Redis (TCP 6379)"),
    closed("operator", "", None, "lets the operator reach the dashboard"),
    closed("operator", "ingress.0.ports", [{"port": 8000}], "lets the operator reach the dashboard"),
    closed("prometheus", "ingress.0.ports", [{"port": 8000}, {"port": 9101}], "Prometheus reach 'metrics' (TCP 8080)"),
    Variant("open-ports", "NetworkPolicy/manta-clients", "ingress.0.ports.0.port", "serve", "opens 6379 (Ray's GCS)"),
    Variant("monitors", "PodMonitor/manta", "podMetricsEndpoints.0.port", "srve", "has a port 'srve'"),
    Variant("monitors", "PodMonitor/manta", "selector.matchLabels", {}, "'serve' of up to 11 pods is asked"),
    of_ray("operator-refuses", "metadata.name", "m" * 48, "at most 47 of a-z, 0-9 and -"),
    of_ray("operator-refuses", "metadata.name", "1manta", "begin with a letter"),
    of_ray("operator-refuses", "rayClusterConfig.authOptions.enableK8sTokenAuth", True, "is not for a RayService"),
    of_ray("operator-refuses", "upgradeStrategy.type", "Rolling", "must be one of NewCluster"),
    of_ray("operator-refuses", f"{DECODE}.{POD}.restartPolicy", "Always", "Never or not given with autoscaler v2"),
    of_ray("group-names", f"{PREFILL}.groupName", "decode", "groupName decode stands there 2 times"),
    of_ray("dashboard-host", f"{HEAD}.rayStartParams.dashboard-host", "127.0.0.1", "must be 0.0.0.0, got 127.0.0.1"),
    of_ray("autoscaler-token", f"{HEAD}.{POD}.automountServiceAccountToken", False, "asks the API server for pods"),
    of_ray("redis", f"{REDIS}.redisAddress", "redis://redis:6379", "names redis, but no Service has that name"),
    of_ray("redis", f"{REDIS}.redisPassword", {"value": "x"}, "must come from a Secret"),
    of_ray("memory", f"{DECODE}.{POD}.volumes.1.emptyDir.sizeLimit", "64Mi", "must hold object-store-memory (0.93"),
    of_ray("memory", f"{DECODE}.rayStartParams.object-store-memory", "200000000000", "(187.26 GiB), got 128.00"),
    of_ray("memory", f"{INGRESS}.{MAIN}.resources.limits.memory", "1Gi", "1 GiB for Ray itself (1.93 GiB), got 1.00"),
    of_ray("gpu-kind", f"{DECODE}.{POD}.nodeSelector", {"nvidia.com/gpu.product": "NVIDIA-L4"}, "type is H100, but"),
    Variant("shared-volume", "PersistentVolumeClaim/manta-models", "accessModes", ["ReadWriteOnce"], "up to 11 pods"),
    Variant("disruption-budget", "PodDisruptionBudget/manta-decode", "minAvailable", 5, "at most the 4 pods"),
    Variant("disruption-budget", "PodDisruptionBudget/manta-decode", "minAvailable", "50%", "a number: pods of"),
    Variant("disruption-budget", "PodDisruptionBudget/manta-head", "minAvailable", 1, "must be 100, so that no pod is"),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_one_mistake_in_an_overlay_is_found_by_its_rule(variant):
    found = violations(variant.manifests())
    assert variant.rule in {violation.rule for violation in found}
    assert variant.says in " ".join(str(violation) for violation in found if violation.rule == variant.rule)


SERVE_VARIANTS: dict[str, tuple[Callable[[Manifest], Any], str, str]] = {
    "no proxy beside the replicas": (
        lambda serve: put(serve, "proxy_location", "HeadOnly"),
        "proxy-location",
        "must be EveryNode, got HeadOnly",
    ),
    "no proxy at all": (
        lambda serve: put(serve, "proxy_location", "Disabled"),
        "proxy-location",
        "must be EveryNode, got Disabled",
    ),
    "a deployment that is not there": (
        lambda serve: put(serve, "applications.0.deployments.0.name", "ingres"),
        "broken-serve-config",
        "must be one of ingress, decode-qwen3-8b, prefill-qwen3-8b",
    ),
    "more replicas than pods, beside args": (
        lambda serve: serve["applications"][0]["deployments"].append({"name": "decode-qwen3-8b", "num_replicas": 40}),
        "capacity",
        "decode-qwen3-8b may grow to 40 replicas, but the pods hold 4 of them",
    ),
    "a larger maximum than pods, beside args": (
        lambda serve: put(serve, "applications.0.deployments.0.autoscaling_config", {"max_replicas": 9}),
        "capacity",
        "ingress may grow to 9 replicas, but the pods hold 8 of them",
    ),
}


@pytest.mark.parametrize("variant", SERVE_VARIANTS)
def test_one_mistake_in_the_serve_configuration_of_an_overlay_is_found_by_its_rule(variant):
    change, rule, says = SERVE_VARIANTS[variant]
    manifests = copy.deepcopy(rendered(ROOT / "k8s" / "overlays" / "pd-disagg"))
    (service,) = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    change(serve)
    service["spec"]["serveConfigV2"] = yaml.safe_dump(serve)
    found = violations(manifests)
    assert {violation.rule for violation in found} == {rule}
    assert says in " ".join(map(str, found))


def test_fields_that_the_operator_writes_are_those_of_the_version_whose_schema_is_here():
    """A table of another version would have other fields."""
    assert f"| {kuberay.KUBERAY} |" in (crds.FOLDER / "README.md").read_text()
    spec = json.loads((crds.FOLDER / "rayservices.ray.io.json").read_text())["schema"]["properties"]["spec"]
    for field in kuberay.WRITTEN:
        place = spec["properties"]["rayClusterConfig"]["properties"]["workerGroupSpecs"]["items"]
        for step in field.split("."):
            place = place["items"] if step == "*" else place["properties"][step]


def test_a_ray_service_of_others_has_one_violation():
    manifests = copy.deepcopy(rendered(ROOT / "k8s" / "overlays" / "cpu-demo"))
    (service,) = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    service["spec"]["serveConfigV2"] = "applications:\n  - {name: fruit, import_path: fruit.deployment_graph}\n"
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["dashboard-host"] = "127.0.0.1"
    (violation,) = violations(manifests)
    assert violation.rule == "not-manta"


def test_the_readme_names_every_rule_of_the_lint_and_no_other():
    """In its table of mistakes and what finds them."""
    text = (ROOT / "k8s" / "README.md").read_text()
    table = text[text.index("| mistake |") : text.index("## Overlays")]
    sources = "".join(
        (ROOT / "cluster" / "cli" / "lint" / f"{module}.py").read_text() for module in ("rules", "serve", "kuberay")
    )
    named = {part for row in table.strip().splitlines() for part in row.rsplit("|", 2)[1].split("`")[1::2]}
    rules = {part.split('"')[1] for part in sources.split("Violation(")[1:] if part.startswith('"')}
    assert rules <= named
    assert {name for name in named if " " not in name} == rules
