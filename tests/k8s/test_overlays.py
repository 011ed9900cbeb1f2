"""What kustomize makes of each overlay, held against the schemas and against `manta k8s lint`."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster.app import build
from cluster.cli.lint.manifests import Manifest, kustomize, read
from cluster.cli.lint.rules import findings
from cluster.config import BUILDER, AppConfig

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted((ROOT / "k8s" / "overlays").iterdir())
CRDS = ROOT.parent / "shared" / "crds"
KUBERNETES = "1.37"
NOT_BUILT_IN = ("ray.io/", "monitoring.coreos.com/")

needs_kustomize = pytest.mark.skipif(kustomize() is None, reason="neither kubectl nor kustomize is installed")
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)


@cache
def rendered(overlay: Path) -> list[Manifest]:
    return read(overlay)


@cache
def crds() -> tuple[dict[tuple[str, str], Any], Any]:
    """Validators by apiVersion and kind, and the function that applies one."""
    if not CRDS.is_dir():
        pytest.skip(f"KubeRay's CRDs are not in {CRDS}")
    checker = runpy.run_path(str(CRDS / "crd_validate.py"))
    return checker["load"](CRDS), checker["errors"]


def ray_service(manifests: list[Manifest]) -> Manifest:
    (service,) = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    return service


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
