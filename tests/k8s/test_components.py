"""Components that no overlay has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from cluster.cli.lint.manifests import Manifest
from cluster.config.app_config import AppConfig
from tests.k8s import crds
from tests.k8s.overlays import OVERLAYS, ROOT, needs_kustomize, of_kind, ray_groups, ray_service, rendered
from tests.k8s.rules.every_rule import violations

pytestmark = needs_kustomize


def demo_with(component: str, folder: Path, **more: list[Manifest]) -> list[Manifest]:
    """The overlay cpu-demo, with a component and what an overlay says beside it."""
    k8s = os.path.relpath(ROOT / "k8s", folder)
    text = {"resources": [f"{k8s}/overlays/cpu-demo"], "components": [f"{k8s}/components/{component}"], **more}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return rendered(folder)


@pytest.mark.parametrize("component", ["monitoring", "tracing", "gateway", "inference-pool", "gcs-redis"])
def test_no_rule_finds_anything_in_the_demo_with_a_component_more(component, tmp_path):
    assert [str(violation) for violation in violations(demo_with(component, tmp_path))] == []


def test_component_for_traces_lets_pods_of_ray_reach_a_collector(tmp_path):
    manifests = demo_with("tracing", tmp_path)
    (policy,) = [m for m in of_kind("NetworkPolicy", manifests) if m["metadata"]["name"] == "manta-traces"]
    collector = {"namespaceSelector": {"matchLabels": {"manta/tracing": "allowed"}}}
    assert policy["spec"]["egress"] == [{"to": [collector], "ports": [{"protocol": "TCP", "port": 4318}]}]
    for group in ray_groups(manifests).values():
        selected = policy["spec"]["podSelector"]["matchLabels"].items()
        assert selected <= group["template"]["metadata"]["labels"].items()


def test_release_of_the_prometheus_operator_is_set_by_the_patch_that_the_component_names(tmp_path):
    operation = {"op": "replace", "path": "/metadata/labels/release", "value": "mine"}
    patch = {"target": {"group": "monitoring.coreos.com"}, "patch": yaml.safe_dump([operation])}
    manifests = demo_with("monitoring", tmp_path, patches=[patch])
    found = of_kind("PodMonitor", manifests) + of_kind("PrometheusRule", manifests)
    assert len(found) == 4
    assert {manifest["metadata"]["labels"]["release"] for manifest in found} == {"mine"}
    assert "release" not in ray_service(manifests)["metadata"].get("labels", {})


def test_route_of_the_gateway_leads_to_the_service_and_waits_longer_than_any_request_may_take(tmp_path):
    manifests = demo_with("gateway", tmp_path)
    (route,) = of_kind("HTTPRoute", manifests)
    (rule,) = route["spec"]["rules"]
    serve = yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"])
    name = f"{ray_service(manifests)['metadata']['name']}-serve-svc"  # as KubeRay names it
    assert rule["backendRefs"] == [{"name": name, "port": serve["http_options"]["port"]}]
    for overlay in OVERLAYS:
        (app,) = yaml.safe_load((overlay / "serve_config.yaml").read_text())["applications"]
        request_s = AppConfig.parse(app["args"]).ingress.request_timeout_s
        assert {float(limit.removesuffix("s")) > request_s for limit in rule["timeouts"].values()} == {True}


@pytest.mark.parametrize("component", ["gateway", "inference-pool", "monitoring"])
def test_custom_resources_of_a_component_follow_their_schemas(component, tmp_path):
    custom = [m for m in demo_with(component, tmp_path) if (m["apiVersion"], m["kind"]) in crds.kinds()]
    assert len(custom) > 1  # the RayService is one
    assert [error for manifest in custom for error in crds.errors(manifest)] == []


def test_inference_pool_has_the_pods_with_proxies_and_the_route_leads_to_it(tmp_path):
    manifests = demo_with("inference-pool", tmp_path)
    (pool,), (route,) = of_kind("InferencePool", manifests), of_kind("HTTPRoute", manifests)
    selector = pool["spec"]["selector"]["matchLabels"]
    assert selector.pop("ray.io/serve") == "true"  # KubeRay's own label, on pods that its Service selects
    (workers,) = [group for name, group in ray_groups(manifests).items() if name != "head"]
    assert selector.items() <= workers["template"]["metadata"]["labels"].items()
    serve = yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"])
    assert pool["spec"]["targetPorts"] == [{"number": serve["http_options"]["port"]}]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_overlay_can_be_installed_a_second_time_in_another_namespace(overlay, tmp_path):
    text = {"namespace": "other", "resources": [os.path.relpath(overlay, tmp_path)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(text))
    manifests = rendered(tmp_path)
    assert [str(violation) for violation in violations(manifests)] == []
    (namespace,) = of_kind("Namespace", manifests)
    assert namespace["metadata"]["name"] == "other"
    assert {m["metadata"].get("namespace") for m in manifests if m["kind"] not in ("Namespace", "PriorityClass")} == {
        "other"
    }
