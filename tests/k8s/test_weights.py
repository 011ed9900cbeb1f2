"""Weights are there before the application is built, also at the first `kubectl apply`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.cli.lint.manifests import Manifest
from tests.k8s.overlays import OVERLAYS, needs_kustomize, of_kind, ray_groups, ray_service, rendered

WITH_WEIGHTS = [overlay for overlay in OVERLAYS if "model-cache" in (overlay / "kustomization.yaml").read_text()]

pytestmark = needs_kustomize
every_overlay_with_weights = pytest.mark.parametrize("overlay", WITH_WEIGHTS, ids=lambda overlay: overlay.name)


def job(overlay: Path) -> Manifest:
    (found,) = of_kind("Job", rendered(overlay))
    return found


def downloader(overlay: Path) -> Manifest:
    return job(overlay)["spec"]["template"]["spec"]["containers"][0]


def waiter(overlay: Path) -> Manifest:
    containers = ray_groups(rendered(overlay))["head"]["template"]["spec"]["initContainers"]
    (container,) = [container for container in containers if container["name"] == "wait-for-weights"]
    return container


def models(container: Manifest, overlay: Path) -> str:
    """MODELS, which comes from a ConfigMap."""
    (source,) = container["envFrom"]
    (found,) = [
        manifest["data"]["MODELS"]
        for manifest in of_kind("ConfigMap", rendered(overlay))
        if manifest["metadata"]["name"] == source["configMapRef"]["name"]
    ]
    return found


def run(container: Manifest, folder: Path, *, wanted: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script of a container with `folder` for /models, and the commands in `path` before the machine's own."""
    script = container["args"][0].replace("/models", str(folder))
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "MODELS": wanted}
    return subprocess.run([*container["command"], script], env=environment, capture_output=True, text=True, timeout=20)


def commands(folder: Path, **scripts: str) -> str:
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@every_overlay_with_weights
def test_job_fetches_the_models_that_its_overlay_serves_and_no_other(overlay):
    (application,) = yaml.safe_load(ray_service(rendered(overlay))["spec"]["serveConfigV2"])["applications"]
    served = {model["model"] for model in application["args"]["models"]}
    assert {f"/models/{pair.partition('=')[2]}" for pair in models(downloader(overlay), overlay).split()} == served


@every_overlay_with_weights
def test_head_waits_for_the_models_that_the_job_fetches(overlay):
    """It builds the application, once; KubeRay does not ask again after that has failed."""
    assert models(waiter(overlay), overlay) == models(downloader(overlay), overlay)
    assert (
        waiter(overlay)["image"] == ray_groups(rendered(overlay))["head"]["template"]["spec"]["containers"][0]["image"]
    )


@every_overlay_with_weights
def test_nothing_ends_a_service_for_good_because_its_weights_come_late(overlay):
    """After this timeout KubeRay 1.7 removes the cluster and starts no other, whatever is applied."""
    assert "ray.io/initializing-timeout" not in ray_service(rendered(overlay))["metadata"].get("annotations", {})


def test_head_waits_until_every_model_is_complete(tmp_path):
    models, done = tmp_path / "models", tmp_path / "slept"
    for name in ("a", "b"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").touch()  # one of the first files to come
    (models / "a" / ".complete").touch()
    path = commands(tmp_path / "bin", sleep=f"touch {done} {models}/b/.complete")
    waited = run(waiter(WITH_WEIGHTS[0]), models, wanted="x/a=a x/b=b", path=path)
    assert waited.returncode == 0
    assert done.exists()
    assert waited.stdout.splitlines() == [f"waiting for job/manta-model-download to complete {models}/b"]


def test_model_is_complete_only_when_all_of_it_has_come(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    path = commands(tmp_path / "bin", hf='mkdir -p "$4" && [ "$2" != x/bad ]')
    assert run(downloader(WITH_WEIGHTS[0]), models, wanted="x/good=g x/bad=b x/late=l", path=path).returncode != 0
    assert [folder.parent.name for folder in models.rglob(".complete")] == ["g"]


def test_complete_model_is_not_fetched_again(tmp_path):
    """Replicas may be reading it."""
    models = tmp_path / "models"
    (models / "g").mkdir(parents=True)
    (models / "g" / ".complete").touch()
    path = commands(tmp_path / "bin", hf="exit 1")
    assert run(downloader(WITH_WEIGHTS[0]), models, wanted="x/good=g", path=path).returncode == 0


@every_overlay_with_weights
def test_finished_job_is_out_of_the_way_of_the_next_apply(overlay):
    """The template of a Job cannot be changed, and each release has another image."""
    assert job(overlay)["spec"]["ttlSecondsAfterFinished"] <= 600
    annotations = job(overlay)["metadata"]["annotations"]
    assert annotations["argocd.argoproj.io/hook"] == "Sync"
    assert annotations["kustomize.toolkit.fluxcd.io/force"] == "enabled"


@every_overlay_with_weights
def test_claim_for_weights_names_its_storage_class(overlay):
    (claim,) = of_kind("PersistentVolumeClaim", rendered(overlay))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]  # which the default class often cannot do
    assert claim["spec"]["storageClassName"]
