"""Each overlay, as kustomize renders it, follows the schemas, `manta k8s lint`, and rules for its pods."""

from __future__ import annotations

import re
import runpy
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster import haproxy
from cluster.app import build
from cluster.cli.lint.manifests import Manifest, Service, quantity
from cluster.cli.lint.rules import findings
from cluster.config import BUILDER, AppConfig
from tests.k8s.overlays import (
    OVERLAYS,
    ROOT,
    containers,
    every_overlay,
    needs_kustomize,
    ray_groups,
    ray_service,
    rendered,
)

CRDS = ROOT.parent / "shared" / "crds"
KUBERNETES = "1.37"
NOT_BUILT_IN = ("ray.io/", "monitoring.coreos.com/")


@cache
def crds() -> tuple[dict[tuple[str, str], Any], Any]:
    """Validators by apiVersion and kind, and the function that applies one."""
    if not CRDS.is_dir():
        pytest.skip(f"KubeRay's CRDs are not in {CRDS}")
    checker = runpy.run_path(str(CRDS / "crd_validate.py"))
    return checker["load"](CRDS), checker["errors"]


@every_overlay
def test_serve_configuration_of_an_overlay_is_one_that_we_can_parse(overlay):
    applications = yaml.safe_load((overlay / "serve_config.yaml").read_text())["applications"]
    for application in applications:
        assert application["import_path"] == BUILDER == f"{build.__module__}:{build.__name__}"
        AppConfig.parse(application["args"])


@needs_kustomize
@every_overlay
def test_ray_service_carries_the_text_that_serve_run_reads(overlay):
    assert ray_service(rendered(overlay))["spec"]["serveConfigV2"] == (overlay / "serve_config.yaml").read_text()


@needs_kustomize
@every_overlay
def test_built_in_kinds_of_an_overlay_follow_their_schemas(overlay):
    built_in = [m for m in rendered(overlay) if not m["apiVersion"].startswith(NOT_BUILT_IN)]
    assert {"Namespace", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"} <= {m["kind"] for m in built_in}
    for manifest in built_in:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@needs_kustomize
@every_overlay
def test_ray_service_of_an_overlay_follows_the_schema_of_kuberay(overlay):
    validators, errors = crds()
    service = ray_service(rendered(overlay))
    assert errors(validators["ray.io/v1", "RayService"], service) == []


@needs_kustomize
def test_the_schema_of_kuberay_sees_a_misspelt_key():
    validators, errors = crds()
    service = yaml.safe_load(yaml.safe_dump(ray_service(rendered(OVERLAYS[0]))))
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 1
    assert any("maxReplica" in error for error in errors(validators["ray.io/v1", "RayService"], service))


@needs_kustomize
@every_overlay
def test_pods_of_an_overlay_follow_the_schema_of_pods(overlay):
    """KubeRay's CRD has a copy of it that may be older than the server's."""
    cluster = ray_service(rendered(overlay))["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@needs_kustomize
@every_overlay
def test_lint_finds_nothing_in_an_overlay(overlay):
    assert [str(finding) for finding in findings(rendered(overlay))] == []


@needs_kustomize
@every_overlay
def test_containers_of_an_overlay_are_restricted_and_only_those_with_rdma_may_lock_memory(overlay):
    """The level `restricted`, and a root file system that nobody writes."""
    for container, pod in containers(rendered(overlay)):
        own = container["securityContext"]
        both = pod["securityContext"] | own
        assert both["runAsNonRoot"] is True and both["seccompProfile"]["type"] == "RuntimeDefault"
        assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True
        assert own["capabilities"]["drop"] == ["ALL"]
        uses_rdma = any(name.startswith("rdma/") for name in container["resources"]["limits"])
        assert set(own["capabilities"].get("add", [])) <= ({"IPC_LOCK"} if uses_rdma else set())
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))


@needs_kustomize
@every_overlay
def test_containers_of_an_overlay_have_pinned_images_guaranteed_memory_and_no_secret_in_clear(overlay):
    for container, _ in containers(rendered(overlay)):
        tag = container["image"].rsplit("/", 1)[-1].partition(":")[2]
        assert "@sha256:" in container["image"] or tag not in ("", "latest")
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        for entry in container.get("env", []):
            assert not re.search(r"(TOKEN|PASSWORD|SECRET|_KEY)$", entry["name"]) or "value" not in entry


@needs_kustomize
@every_overlay
def test_ray_pods_of_an_overlay_are_told_of_what_they_have(overlay):
    for name, group in ray_groups(rendered(overlay)).items():
        pod, labels = group["template"]["spec"], group.get("labels", {})
        resources, ray = pod["containers"][0]["resources"], group["rayStartParams"]
        gpus = float(resources["limits"].get("nvidia.com/gpu", 0))
        assert "/tmp" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]  # Ray writes there
        if name == "head":
            assert ray["num-cpus"] == "0"  # no replica lives beside Ray's own services
            continue
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert float(ray.get("num-gpus", gpus)) == gpus
        assert float(ray.get("num-cpus", 0)) <= quantity(resources["requests"]["cpu"])
        if gpus:
            assert "nvidia.com/gpu" in [toleration["key"] for toleration in pod["tolerations"]]
            assert pod["nodeSelector"] and labels["ray.io/accelerator-type"]


@needs_kustomize
@every_overlay
def test_ray_pods_of_an_overlay_share_an_image_the_front_and_the_mounts_of_the_configuration(overlay):
    manifests = rendered(overlay)
    service = Service(ray_service(manifests), manifests)
    assert len({group.main["image"] for group in service.groups}) == 1
    ((_, config),) = service.apps
    for group in service.groups:
        assert haproxy.FRONT.items() <= group.env.items()
        mounts = {Path(mount["mountPath"]) for mount in group.main["volumeMounts"]}
        for path in [m.model for m in config.models if m.model.startswith("/")] + [config.ingress.api_keys_file or ""]:
            assert not path or mounts & {Path(path), *Path(path).parents}, (group.where, path)


@needs_kustomize
@every_overlay
def test_ray_service_of_an_overlay_is_of_the_installed_ray_and_closed_to_those_without_its_token(overlay):
    spec = ray_service(rendered(overlay))["spec"]
    cluster = spec["rayClusterConfig"]
    assert cluster["rayVersion"] == version("ray")
    assert cluster["authOptions"]["mode"] == "token"  # whoever reaches Ray's ports may run anything
    assert spec.get("upgradeStrategy", {"type": "NewCluster"})["type"] == "NewCluster"
    assert yaml.safe_load(spec["serveConfigV2"])["http_options"]["host"] == "0.0.0.0"


@needs_kustomize
@every_overlay
def test_only_the_operator_reaches_the_dashboard_of_an_overlay_and_clients_reach_its_api(overlay):
    opened: dict[int, list[Manifest]] = {}
    for policy in (manifest for manifest in rendered(overlay) if manifest["kind"] == "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for entry in rule.get("ports", []):
                opened.setdefault(entry["port"], []).extend(rule["from"])
    assert [peer["podSelector"]["matchLabels"] for peer in opened[8265]] == [
        {"app.kubernetes.io/name": "kuberay-operator"}
    ]
    assert {"namespaceSelector": {"matchLabels": {"manta/clients": "allowed"}}} in opened[8000]


@needs_kustomize
@every_overlay
def test_monitors_of_an_overlay_name_ports_of_the_pods_that_they_select(overlay):
    manifests = rendered(overlay)
    for monitor in (manifest for manifest in manifests if manifest["kind"] == "PodMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        templates = [group["template"] for group in ray_groups(manifests).values()]
        selected = [template for template in templates if labels <= template["metadata"]["labels"].items()]
        ports = {port["name"] for template in selected for port in template["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


@needs_kustomize
@every_overlay
def test_what_pods_of_an_overlay_mount_is_made_by_it_or_told_in_the_readme(overlay):
    manifests, readme = rendered(overlay), (ROOT / "k8s" / "README.md").read_text()
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    cluster = ray_service(manifests)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        for volume in pod["volumes"]:
            if (claim := volume.get("persistentVolumeClaim")) is not None:
                assert ("PersistentVolumeClaim", claim["claimName"]) in made
            if (secret := volume.get("secret")) is not None:
                assert f"`{secret['secretName']}`" in readme
        for source in pod["containers"][0]["envFrom"]:
            assert ("ConfigMap", source["configMapRef"]["name"]) in made
    assert f"`{cluster['authOptions']['secretName']}`" in readme


@needs_kustomize
@every_overlay
def test_every_pool_of_an_overlay_has_a_disruption_budget_that_its_pods_can_meet(overlay):
    manifests = rendered(overlay)
    least = {
        manifest["spec"]["selector"]["matchLabels"]["manta/pool"]: manifest["spec"]["minAvailable"]
        for manifest in manifests
        if manifest["kind"] == "PodDisruptionBudget"
    }
    groups = ray_service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pods = {group["groupName"]: group["maxReplicas"] * group.get("numOfHosts", 1) for group in groups}
    assert least.keys() == {"head", *pods}
    assert all(least[name] <= pods[name] for name in pods)
