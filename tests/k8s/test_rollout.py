"""What the chart renders for a new version inside one RayCluster, and for a second cluster that grows in steps."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster.cli.lint.change import Change, change_of
from cluster.cli.lint.manifests import Manifest, Service
from cluster.cli.lint.pods import gpus, pods_of
from cluster.config.ingress_section import IngressSection
from tests.k8s import crds
from tests.k8s.overlays import ROOT, needs_helm, of_kind, ray_groups, ray_service
from tests.k8s.rules.every_rule import violations
from tests.k8s.test_chart import refusal, template
from tests.k8s.test_overlays import KUBERNETES

GPU_OVERLAYS = ["single-gpu", "multi-node-tp", "multi-node-pp", "pd-disagg"]
OLD, NEW, NEWEST = "0.1.0-gpu", "0.2.0-gpu", "0.3.0-gpu"
LABEL = "manta/version"

pytestmark = needs_helm
every_gpu_overlay = pytest.mark.parametrize("overlay", GPU_OVERLAYS)


def tagged(overlay: str, *tags: str, serving: str = "", **values: Any) -> list[Manifest]:
    return template(overlay=overlay, rollout={"tags": [*tags]}, image={"tag": serving}, **values)


def service(manifests: list[Manifest]) -> Service:
    return Service(ray_service(manifests), manifests)


def change(before: list[Manifest], after: list[Manifest]) -> Change:
    return change_of(service(before), service(after))


def served(manifests: list[Manifest]) -> Any:
    (application,) = yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"])["applications"]
    return application


def names_of(tag: str, groups: dict[str, Manifest]) -> list[str]:
    return [name for name, group in groups.items() if group["labels"][LABEL] == tag and name != "head"]


@every_gpu_overlay
def test_another_tag_appends_groups_and_changes_the_cluster_in_place(overlay):
    before, after = tagged(overlay, OLD), tagged(overlay, OLD, NEW)
    groups = ray_groups(after)
    assert change(before, after) == Change("in place", appended=names_of(NEW, groups), reconfigured=True)
    assert [group["maxReplicas"] for group in groups.values() if "groupName" in group] == [
        group["maxReplicas"] for group in ray_groups(before).values() if "groupName" in group
    ] * 2


@every_gpu_overlay
def test_a_further_tag_is_appended_too_and_the_first_one_stays_that_of_the_head(overlay):
    before, after = tagged(overlay, OLD, NEW), tagged(overlay, OLD, NEW, NEWEST)
    assert change(before, after).way == "in place"
    (image,) = {container["image"] for container in ray_groups(after)["head"]["template"]["spec"]["containers"]}
    assert image.endswith(f":{OLD}")


@every_gpu_overlay
@pytest.mark.parametrize("serving", [OLD, NEW])
def test_the_way_back_changes_only_the_serve_configuration(overlay, serving):
    three = tagged(overlay, OLD, NEW, NEWEST)
    found = change(three, tagged(overlay, OLD, NEW, NEWEST, serving=serving))
    assert (found.way, found.reconfigured, found.reasons) == ("nothing", True, [])


@every_gpu_overlay
def test_groups_of_a_tag_have_its_image_and_its_label_and_all_else_of_the_overlay(overlay):
    plain, groups = ray_groups(template(overlay=overlay)), ray_groups(tagged(overlay, OLD, NEW))
    for name, group in plain.items():
        for tag, own in ((OLD, groups[name]), *([(NEW, groups[f"{name}-0-2-0-gpu"])] if name != "head" else [])):
            own = copy.deepcopy(own)
            assert own["labels"].pop(LABEL) == tag
            (image,) = {container.pop("image") for container in own["template"]["spec"]["containers"]}
            assert image == f"registry.example.com/manta:{tag}"
            for container in group["template"]["spec"]["containers"]:
                container = {key: value for key, value in container.items() if key != "image"}
                assert container in own["template"]["spec"]["containers"]
            unlike = {key for key in {*own, *group} if own.get(key) != group.get(key) and own.get(key) != {}}
            assert unlike <= {"groupName", "replicas", "minReplicas", "maxReplicas", "template"}


@every_gpu_overlay
def test_one_replica_of_each_gpu_group_starts_and_the_ingresses_of_the_overlay(overlay):
    plain, groups = ray_groups(template(overlay=overlay)), ray_groups(tagged(overlay, OLD, NEW))
    for name, group in plain.items():
        if name == "head":
            continue
        old, new = groups[name], groups[f"{name}-0-2-0-gpu"]
        assert (old["replicas"], old["minReplicas"]) == (0, 0)
        has_gpus = group["rayStartParams"].get("num-gpus", "0") != "0"
        expected = (1, 0) if has_gpus else (group["replicas"], group["minReplicas"])
        assert (new["replicas"], new["minReplicas"]) == expected
        assert group["maxReplicas"] + 1 == new["maxReplicas"]


@every_gpu_overlay
@pytest.mark.parametrize(("tags", "serving"), [((OLD,), ""), ((OLD, NEW), ""), ((OLD, NEW), OLD)])
def test_every_deployment_asks_for_the_tag_that_serves_and_starts_a_replica_before_it_stops_one(overlay, tags, serving):
    manifests = tagged(overlay, *tags, serving=serving)
    application, plain = served(manifests), served(template(overlay=overlay))
    expected = serving or tags[-1]
    deployments = {each["name"]: each for each in application["deployments"]}
    ingress = deployments.pop("ingress")["ray_actor_options"]
    assert ingress["label_selector"][LABEL] == expected
    assert ingress["num_cpus"] == plain["args"]["ingress"]["num_cpus"]
    for model, before in zip(application["args"]["models"], plain["args"]["models"], strict=True):
        pools = [pool for pool in ("decode", "prefill", "encode") if pool in before]
        assert deployments == {
            f"{p}-{model['name']}": {"name": f"{p}-{model['name']}", "max_surge_percent": 1} for p in pools
        }
        for pool in pools:
            assert model[pool]["label_selector"].pop(LABEL) == expected
            assert model[pool].pop("label_selector") == before[pool].pop("label_selector", {})
    assert application["args"] == plain["args"]


@every_gpu_overlay
@pytest.mark.parametrize(("tags", "serving"), [((OLD,), ""), ((OLD, NEW), ""), ((OLD, NEW), OLD)])
def test_what_is_rendered_breaks_no_rule_and_follows_the_schemas(overlay, tags, serving):
    manifests = tagged(overlay, *tags, serving=serving)
    assert violations(manifests) == []
    for manifest in manifests:
        if (manifest["apiVersion"], manifest["kind"]) in crds.kinds():
            assert crds.errors(manifest) == []
        elif "." not in manifest["apiVersion"].partition("/")[0] or "k8s.io" in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_objects_beside_the_service_are_those_of_the_first_tag():
    before, after = tagged("pd-disagg", OLD), tagged("pd-disagg", OLD, NEW)
    assert [m for m in before if m["kind"] != "RayService"] == [m for m in after if m["kind"] != "RayService"]


@pytest.mark.parametrize(
    ("overlay", "spare", "of_a_second_cluster"),
    [("single-gpu", 1, 4), ("multi-node-tp", 4, 8), ("multi-node-pp", 4, 8), ("pd-disagg", 2, 8)],
)
def test_a_roll_needs_the_gpus_of_one_replica_of_each_pool_and_a_second_cluster_all_of_them(
    overlay, spare, of_a_second_cluster
):
    def more(before: list[Manifest], after: list[Manifest]) -> int:
        was, now = service(before), service(after)
        counts, groups = pods_of(was, now, change_of(was, now)), [*was.groups, *now.groups]
        assert gpus(counts.before, groups) == gpus(counts.after, groups)
        return gpus(counts.during, groups) - gpus(counts.before, groups)

    assert more(tagged(overlay, OLD), tagged(overlay, OLD, NEW)) == spare
    assert more(tagged(overlay, OLD, NEW), tagged(overlay, OLD, NEW, serving=OLD)) == spare
    assert more(template(overlay=overlay), template(overlay=overlay, image={"tag": NEW})) == of_a_second_cluster


def test_the_page_has_the_numbers_of_the_lint():
    steps = {"incrementalUpgrade": {"gatewayClassName": "mine"}}
    told = []
    for before, after in [
        (template(overlay="single-gpu"), template(overlay="single-gpu", image={"tag": NEW})),
        (tagged("single-gpu", OLD), tagged("single-gpu", OLD, NEW)),
        (template(overlay="single-gpu", **steps), template(overlay="single-gpu", image={"tag": NEW}, **steps)),
    ]:
        was, now = service(before), service(after)
        counts = pods_of(was, now, change_of(was, now))
        columns = ", ".join(str(column.total()) for column in (counts.before, counts.during, counts.after))
        told.append((columns, str(gpus(counts.during, [*was.groups, *now.groups]))))
    rows = re.findall(r"^\|.*\| (\d+, \d+, \d+) \| (\d+) \|", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE)
    assert rows == told


def test_ingress_without_options_of_its_own_keeps_its_cpus():
    config = {"applications": [served(template(overlay="single-gpu"))]}
    del config["applications"][0]["args"]["ingress"]["num_cpus"]
    application = served(tagged("single-gpu", OLD, serveConfig=config))
    (ingress,) = [each for each in application["deployments"] if each["name"] == "ingress"]
    assert ingress["ray_actor_options"]["num_cpus"] == IngressSection().num_cpus


def test_replicas_that_change_roles_are_one_deployment():
    config = {"applications": [served(template(overlay="pd-disagg"))]}
    config["applications"][0]["args"]["models"][0]["handoff"]["switch_roles"] = True
    names = [each["name"] for each in served(tagged("pd-disagg", OLD, serveConfig=config))["deployments"]]
    assert names == ["ingress", "pd-qwen3-8b"]


def test_options_of_deployments_and_applications_of_others_stay():
    ours, other = served(template(overlay="single-gpu")), {"name": "other", "import_path": "other:app"}
    ours["deployments"] = [{"name": "decode-qwen3-8b", "max_surge_percent": 50, "max_ongoing_requests": 7}]
    manifests = tagged("single-gpu", OLD, serveConfig={"applications": [ours, other]})
    config = yaml.safe_load(ray_service(manifests)["spec"]["serveConfigV2"])
    assert config["applications"][0]["deployments"][0] == ours["deployments"][0]
    assert config["applications"][1] == other


def test_an_upgrade_in_steps_is_what_kuberay_asks_for():
    manifests = template(overlay="pd-disagg", incrementalUpgrade={"gatewayClassName": "mine"})
    assert ray_service(manifests)["spec"]["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {
            "gatewayClassName": "mine", "maxSurgePercent": 25, "stepSizePercent": 25, "intervalSeconds": 60,
        },
    }  # fmt: skip
    assert violations(manifests) == []
    assert [error for m in of_kind("RayService", manifests) for error in crds.errors(m)] == []
    newer = template(overlay="pd-disagg", incrementalUpgrade={"gatewayClassName": "mine"}, image={"tag": NEW})
    assert change(manifests, newer).way == "in steps"
    assert change(manifests, template(overlay="pd-disagg")) == Change("nothing")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rollout": {"tags": [OLD]}, "image": {"tag": NEW}}, f"image.tag: {NEW} is not one of rollout.tags: {OLD}"),
        (
            {"rollout": {"tags": [OLD]}, "image": {"digest": f"sha256:{'0' * 64}"}},
            "image.digest: rollout.tags names images by their tags",
        ),
        ({"rollout": {"tags": ["0.2.0", "0-2-0", "0.2_0"]}}, "worker groups of two tags have the same name"),
        ({"rollout": {"tags": [OLD, OLD]}}, "at '/rollout/tags'"),
        ({"rollout": {"tags": [OLD, "-x"]}}, "at '/rollout/tags/1'"),
        ({"rollout": {"tags": [OLD]}, "overlay": "cpu-demo"}, "only with enableInTreeAutoscaling"),
        (
            {"rollout": {"tags": [OLD]}, "serveConfig": {"applications": [{"name": "a", "import_path": "manta:x"}]}},
            "application a of serveConfig has no args.models",
        ),
        (
            {"incrementalUpgrade": {"gatewayClassName": "x", "stepSizePercent": 50}},
            "incrementalUpgrade.stepSizePercent: above maxSurgePercent",
        ),
        ({"incrementalUpgrade": {"gatewayClassName": "x"}, "overlay": "cpu-demo"}, "needs enableInTreeAutoscaling"),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_by_name(values, says):
    assert says in refusal(**{"overlay": "single-gpu", **values})
