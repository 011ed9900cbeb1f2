"""The Helm chart renders what kustomize does, with helm itself; its values change that, and wrong ones are refused."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import delete
from cluster.cli.lint.manifests import Manifest
from cluster.cli.main import app
from tests.k8s import crds
from tests.k8s.overlays import (
    OVERLAYS,
    ROOT,
    containers,
    every_overlay,
    needs_helm,
    needs_kustomize,
    of_kind,
    ray_groups,
    ray_service,
    rendered,
)
from tests.k8s.rules.every_rule import violations
from tests.k8s.test_overlays import KUBERNETES, broken_controls

CHART = ROOT / "k8s" / "chart"

pytestmark = needs_helm


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    given = ["--values", "-"] if values is not None else []
    text = json.dumps(values)
    return subprocess.run(["helm", *arguments, *given], input=text, capture_output=True, text=True, timeout=60)


@cache
def _template(values: str, chart: Path) -> list[Manifest]:
    done = helm("template", "manta", str(chart), "--namespace", "manta", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def template(chart: Path = CHART, **values: Any) -> list[Manifest]:
    """Return what `helm install` creates."""
    return [manifest for manifest in _template(json.dumps(values), chart) if not is_hook(manifest)]


def hooks(**values: Any) -> dict[str, Manifest]:
    """Return what `helm uninstall` creates first, by kind."""
    return {manifest["kind"]: manifest for manifest in _template(json.dumps(values), CHART) if is_hook(manifest)}


def is_hook(manifest: Manifest) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def refusal(**values: Any) -> str:
    done = helm("template", "manta", str(CHART), values=values)
    assert done.returncode != 0
    return done.stderr


@needs_kustomize
@every_overlay
def test_chart_renders_for_an_overlay_the_objects_of_kustomize(overlay):
    """To the hashes in the names of ConfigMaps."""
    made = template(overlay=overlay.name, namespace={"create": True})
    assert by_name(made) == by_name(rendered(overlay))
    assert len(made) == len(rendered(overlay))


def test_chart_does_not_make_the_namespace_that_helm_needs_beforehand():
    assert of_kind("Namespace", template(overlay="cpu-demo")) == []


def test_chart_passes_the_lint_of_helm():
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout
    assert "0 chart(s) failed" in done.stdout


@every_overlay
def test_uninstall_begins_with_a_job_of_the_charts_image_that_outlasts_every_pod(overlay):
    values = {"overlay": overlay.name, "image": {"repository": "registry.mine/manta"}}
    found, pods = hooks(**values), [group["template"]["spec"] for group in ray_groups(template(**values)).values()]
    assert found.keys() == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Job"}
    assert {hook["metadata"]["annotations"]["helm.sh/hook"] for hook in found.values()} == {"pre-delete"}
    job = found["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["image"] == pods[0]["containers"][0]["image"]
    assert job["activeDeadlineSeconds"] == max(pod["terminationGracePeriodSeconds"] for pod in pods) + 120
    assert CliRunner().invoke(app, [*container["command"][1:], "--help"]).exit_code == 0
    assert container["command"][-1] == ray_service(template(**values))["metadata"]["name"]


def test_job_of_an_uninstall_waits_as_long_as_the_values_let_pods_drain_and_pulls_its_image_as_they_do():
    secrets = [{"name": "registry"}]
    path = "/spec/rayClusterConfig/headGroupSpec/template/spec/imagePullSecrets"
    patch = {"target": {"kind": "RayService"}, "patch": [{"op": "add", "path": path, "value": secrets}]}
    values = {"workerGroups": {"cpu": {"pod": {"terminationGracePeriodSeconds": 1800}}}, "patches": [patch]}
    job = hooks(overlay="cpu-demo", **values)["Job"]["spec"]
    assert job["activeDeadlineSeconds"] == 1920
    assert job["template"]["spec"]["imagePullSecrets"] == secrets


def test_objects_of_an_uninstall_follow_their_schemas_and_its_pod_the_level_of_the_namespace():
    found = hooks(overlay="pd-disagg")
    for hook in found.values():
        kubernetes_validate.validate(hook, KUBERNETES, strict=True)
    pod = found["Job"]["spec"]["template"]["spec"]
    assert broken_controls(pod) == set()
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_job_of_an_uninstall_may_delete_the_service_list_pods_and_do_nothing_else():
    found = hooks(overlay="pd-disagg")
    assert found["Role"]["rules"] == [
        {"apiGroups": ["ray.io"], "resources": ["rayservices"], "resourceNames": ["manta"], "verbs": ["get", "delete"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    name = found["Job"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "manta"}]
    assert found["ServiceAccount"]["metadata"]["name"] == name


def test_pod_of_an_uninstall_reaches_the_api_server_and_is_not_among_those_it_waits_for():
    found, manifests = hooks(overlay="pd-disagg"), template(overlay="pd-disagg")
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (autoscaler,) = [m for m in of_kind("NetworkPolicy", manifests) if m["metadata"]["name"] == "manta-autoscaler"]
    assert found["NetworkPolicy"]["spec"]["egress"] == autoscaler["spec"]["egress"]
    label, _, value = delete.LABELS.partition("=")
    assert labels.get(label) != value
    for group in ray_groups(manifests).values():
        assert group["template"]["metadata"]["labels"][label] == value


def test_the_page_has_kustomizes_users_take_the_steps_of_the_job():
    wait = f"kubectl -n manta wait --for=delete pod -l {delete.LABELS} --timeout=15m"
    steps = ("kubectl -n manta delete rayservice manta", wait, "kubectl delete -k k8s/overlays/")
    assert "\n".join(steps) in (ROOT / "k8s" / "README.md").read_text()


def test_packaged_chart_renders_the_same(tmp_path):
    """It has copies of what its folder only links to."""
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        archive.extractall(tmp_path)
    assert not any(path.is_symlink() for path in (tmp_path / "manta").rglob("*"))
    assert template(tmp_path / "manta", overlay="pd-disagg") == template(overlay="pd-disagg")


def test_values_reach_every_place_that_they_are_about():
    manifests = template(
        overlay="single-gpu",
        image={"repository": "registry.mine/manta", "digest": f"sha256:{'0' * 64}"},
        models="Qwen/Qwen3-4B=Qwen3-4B",
        storage={"size": "80Gi", "className": "nfs"},
        prometheusRelease="mine",
        workerGroups={
            "gpu": {
                "maxReplicas": 8,
                "resources": {"requests": {"memory": "96Gi"}, "limits": {"memory": "96Gi"}},
                "pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}},
            }
        },
    )
    found, group = by_name(manifests), ray_groups(manifests)["gpu"]
    ours = [container["image"] for container, _ in containers(manifests) if "redis" not in container["image"]]
    assert {*ours} == {f"registry.mine/manta@sha256:{'0' * 64}"}
    (weights,) = [m["data"] for (_, name), m in found.items() if name.startswith("manta-weights-")]
    assert weights == {"MODELS": "Qwen/Qwen3-4B=Qwen3-4B"}
    claim = found["PersistentVolumeClaim", "manta-models"]["spec"]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("80Gi", "nfs")
    monitors = of_kind("PodMonitor", manifests) + of_kind("PrometheusRule", manifests)
    assert {monitor["metadata"]["labels"]["release"] for monitor in monitors} == {"mine"}
    assert (group["maxReplicas"], group["minReplicas"]) == (8, 1)
    assert group["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"] == "96Gi"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert [error for m in manifests if (m["apiVersion"], m["kind"]) in crds.kinds() for error in crds.errors(m)] == []


def test_configmap_with_other_data_has_another_name_which_its_pods_know():
    for models in ("a/b=b", "a/c=c"):
        manifests = template(overlay="single-gpu", models=models)
        (name,) = [m["metadata"]["name"] for m in of_kind("ConfigMap", manifests) if "MODELS" in m["data"]]
        waits = ray_groups(manifests)["head"]["template"]["spec"]["initContainers"][0]
        (job,) = of_kind("Job", manifests)
        for container in (waits, *job["spec"]["template"]["spec"]["containers"]):
            assert container["envFrom"] == [{"configMapRef": {"name": name}}]
    assert name not in json.dumps(template(overlay="single-gpu", models="a/b=b"))


@pytest.mark.parametrize("as_text", [True, False])
def test_serve_configuration_can_be_another_text_or_a_mapping(as_text):
    config = yaml.safe_load((OVERLAYS[0] / "serve_config.yaml").read_text())
    config["applications"][0]["args"]["models"][0]["name"] = "mine"
    manifests = template(overlay="cpu-demo", serveConfig=yaml.safe_dump(config) if as_text else config)
    assert yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"]) == config
    assert violations(manifests) == []


def test_helm_takes_a_serve_configuration_as_a_mapping_without_a_warning():
    values = {"serveConfig": yaml.safe_load((OVERLAYS[0] / "serve_config.yaml").read_text())}
    done = helm("template", "manta", str(CHART), values=values)
    assert done.returncode == 0
    assert "warning" not in done.stderr.lower()


def test_the_page_has_helms_users_label_the_namespace_as_kustomize_does():
    labels = yaml.safe_load((ROOT / "k8s" / "base" / "namespace.yaml").read_text())["metadata"]["labels"]
    (command,) = re.findall(
        "^kubectl label namespace manta pod-.*", (ROOT / "k8s" / "README.md").read_text(), re.MULTILINE
    )
    assert command.split()[4:] == [f"{name}={value}" for name, value in labels.items()]


def test_components_replace_those_of_the_overlay_and_patches_change_them():
    operations = [
        {"op": "replace", "path": "/spec/hostnames/0", "value": "llm.mine.example"},
        {"op": "add", "path": "/spec/hostnames/-", "value": "other.example"},
        {"op": "add", "path": "/spec/hostnames/0", "value": "first.example"},
        {"op": "remove", "path": "/spec/rules/0/timeouts/request"},
        {"op": "add", "path": "/metadata/annotations", "value": {}},
        {"op": "add", "path": "/metadata/annotations/a~1b", "value": "c"},
    ]
    manifests = template(
        overlay="cpu-demo",
        components=["serve-config", "gateway"],
        patches=[{"target": {"kind": "HTTPRoute"}, "patch": operations}],
    )
    (route,) = of_kind("HTTPRoute", manifests)
    assert route["spec"]["hostnames"] == ["first.example", "llm.mine.example", "other.example"]
    assert route["spec"]["rules"][0]["timeouts"] == {"backendRequest": "660s"}
    assert route["metadata"]["annotations"] == {"a/b": "c"}
    assert crds.errors(route) == violations(manifests) == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"overlay": "cpudemo"}, "at '/overlay': value must be one of 'cpu-demo', 'single-gpu'"),
        ({"imag": {"tag": "1"}}, "additional properties 'imag' not allowed"),
        ({"image": {"tag": 1}}, "at '/image/tag': got number, want string"),
        ({"image": {"digest": "abc"}}, "at '/image/digest': 'abc' does not match pattern"),
        ({"models": "Qwen/Qwen3-8B"}, "at '/models'"),
        ({"storage": {"size": "40 GB"}}, "at '/storage/size'"),
        ({"workerGroups": {"cpu": {"maxReplica": 3}}}, "additional properties 'maxReplica' not allowed"),
        ({"workerGroups": {"gpu": {"maxReplicas": 3}}}, "workerGroups.gpu: overlay cpu-demo has cpu"),
        ({"components": ["monitorng"]}, "at '/components/0'"),
        (
            {"patches": [{"target": {"kind": "RayService"}, "patch": [{"op": "add", "path": "/spec/x/y/z"}]}]},
            "a patch has the path /spec/x/y/z, which leads nowhere",
        ),
    ],
)
def test_wrong_value_is_refused_by_name(values, says):
    assert says in refusal(**values)


def test_every_value_is_in_the_schema_and_every_component_and_overlay():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(properties) - {"global"} == set(values)
    assert {*properties["overlay"]["enum"]} == {overlay.name for overlay in OVERLAYS}
    folders = {folder.name for folder in (ROOT / "k8s" / "components").iterdir()}
    assert {*properties["components"]["items"]["enum"]} == folders


def test_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (ROOT / "pyproject.toml").read_text().partition('\nversion = "')[2].partition('"')[0]
    assert chart["version"] == chart["appVersion"] == version
