"""What KubeRay does when a RayService changes, and how many pods that takes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.lint.before import costs
from cluster.cli.lint.change import Change, change_of
from cluster.cli.lint.manifests import Manifest, Service
from cluster.cli.lint.pods import Pods, gpus, pods_of
from cluster.cli.main import app
from engine.errors import StartupError
from tests.cluster.cli.lint.good_manifests import GONE, OURS, Deployed, group, template

Edit = Callable[[Deployed], None]
CONTAINER = "template.spec.containers.0"
ENGINE = "serve.applications.0.args.models.0"


def service(deployed: Deployed) -> Service:
    manifests = deployed.manifests()
    return Service(manifests[0], manifests)


def edited(*edits: Edit) -> Deployed:
    deployed = Deployed()
    for edit in edits:
        edit(deployed)
    return deployed


def put(path: str, value: object) -> Edit:
    return lambda deployed: deployed.put(path, value)


def change(new: Deployed, old: Deployed | None = None) -> Change:
    return change_of(service(old or Deployed()), service(new))


def pods(new: Deployed, old: Deployed | None = None) -> Pods:
    was, now = service(old or Deployed()), service(new)
    return pods_of(was, now, change_of(was, now))


def append(deployed: Deployed, version: str = "2", replicas: int = 1) -> None:
    """Append a copy of each group, for pods of another version, and leave the groups before to the autoscaler."""
    for spec in list(deployed.cluster["workerGroupSpecs"]):
        new = copy.deepcopy(spec) | {"groupName": f"{spec['groupName']}-{version}"}
        new |= {"replicas": replicas, "minReplicas": 0, "labels": {**spec["labels"], "version": version}}
        spec |= {"replicas": 0, "minReplicas": 0}
        deployed.cluster["workerGroupSpecs"].append(new)


def labelled(deployed: Deployed) -> None:
    for spec in deployed.cluster["workerGroupSpecs"]:
        spec["labels"] = {**spec["labels"], "version": "1"}
    serves(deployed, "1")


def serves(deployed: Deployed, version: str) -> None:
    """Ask for pods of a version, of which one replica of each deployment is started before another ends."""
    (application,) = deployed.serve["applications"]
    application["args"]["models"][0]["decode"]["label_selector"] = {"pool": "decode", "version": version}
    selector = {"pool": "ingress", "version": version}
    application["deployments"] = [
        {"name": "ingress", "ray_actor_options": {"num_cpus": 1, "label_selector": selector}},
        {"name": "decode-m", "max_surge_percent": 1},
    ]


def roll(deployed: Deployed) -> None:
    labelled(deployed)
    append(deployed)
    serves(deployed, "2")


def reorder(deployed: Deployed) -> None:
    deployed.cluster["workerGroupSpecs"].reverse()


def remove(deployed: Deployed) -> None:
    del deployed.cluster["workerGroupSpecs"][1]


def insert(deployed: Deployed) -> None:
    deployed.cluster["workerGroupSpecs"].insert(0, group("more", template("more"), replicas=1, maximum=1, cpus=2))


REPLACES = {
    "image": (
        put(f"decode.{CONTAINER}.image", "registry.example.com/manta:2"),
        f"workerGroupSpecs.decode.{CONTAINER.replace('0', 'ray')}.image: registry.example.com/manta:1 -> "
        "registry.example.com/manta:2",
    ),
    "image of the head": (
        put(f"head.{CONTAINER}.image", "x:2"),
        "headGroupSpec.template.spec.containers.ray.image: registry.example.com/manta:1 -> x:2",
    ),
    "env": (
        put(f"head.{CONTAINER}.env", [{"name": "A", "value": "1"}]),
        "headGroupSpec.template.spec.containers.ray.env: none -> ...",
    ),
    "ConfigMap of env": (
        put(f"ingress.{CONTAINER}.envFrom.0.configMapRef.name", "ray-env-2"),
        "workerGroupSpecs.ingress.template.spec.containers.ray.envFrom.0.configMapRef.name: ray-env -> ray-env-2",
    ),
    "resources": (
        put(f"decode.{CONTAINER}.resources.requests.memory", "8Gi"),
        "workerGroupSpecs.decode.template.spec.containers.ray.resources.requests.memory: 4Gi -> 8Gi",
    ),
    "start parameters": (
        put("ingress.rayStartParams.num-cpus", "3"),
        "workerGroupSpecs.ingress.rayStartParams.num-cpus: 2 -> 3",
    ),
    "label": (put("decode.labels.version", "2"), "workerGroupSpecs.decode.labels.version: none -> 2"),
    "hosts": (put("decode.numOfHosts", 4), "workerGroupSpecs.decode.numOfHosts: 2 -> 4"),
    "version of Ray": (put("cluster.rayVersion", "3.0.0"), "rayVersion: "),
    "removed group": (remove, "workerGroupSpecs: ingress, decode -> ingress"),
    "reordered groups": (reorder, "workerGroupSpecs: ingress, decode -> decode, ingress"),
    "group before the others": (insert, "workerGroupSpecs: ingress, decode -> more, ingress"),
}


@pytest.mark.parametrize("edit", REPLACES)
def test_field_that_needs_a_second_cluster_is_named_with_both_values(edit):
    change_, says = REPLACES[edit]
    found = change(edited(change_))
    assert found.way == "second cluster"
    (reason,) = found.reasons
    assert reason.startswith(says)


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (put("decode.replicas", 2), "workerGroupSpecs.decode.replicas"),
        (put("decode.minReplicas", 2), "workerGroupSpecs.decode.minReplicas"),
        (put("decode.maxReplicas", 3), "workerGroupSpecs.decode.maxReplicas"),
        (put("decode.template.spec.tolerations", [{"key": "a"}]), "workerGroupSpecs.decode.template.spec.tolerations"),
        (put("head.template.spec.tolerations", [{"key": "a"}]), "headGroupSpec.template.spec.tolerations"),
    ],
    ids=["replicas", "minReplicas", "maxReplicas", "tolerations", "tolerations of the head"],
)
def test_field_that_kuberay_leaves_out_of_its_digest_reaches_no_running_cluster(edit, field):
    assert change(edited(edit)) == Change("nothing", unapplied=[field])


@pytest.mark.parametrize(
    "edit",
    [
        put("env.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "120"),  # the ConfigMap keeps its name
        put(f"decode.{CONTAINER}.resources.requests.memory", "4096Mi"),
        put(f"decode.{CONTAINER}.env", []),
        put("decode.template.spec.nodeSelector", {}),
        put("decode.scaleStrategy", GONE),
        put("spec.rayClusterDeletionDelaySeconds", 300),
    ],
    ids=["a ConfigMap's data", "another form of a quantity", "an empty list", "an empty mapping", "what KubeRay adds",
         "a field outside of rayClusterConfig"],
)  # fmt: skip
def test_what_is_the_same_to_kuberay_changes_nothing(edit):
    assert change(edited(edit)) == Change("nothing")


def test_another_serve_configuration_leaves_the_cluster_as_it_is():
    assert change(edited(put(f"{ENGINE}.decode.max_replicas", 1))) == Change("nothing", reconfigured=True)


def test_groups_that_are_only_appended_change_the_cluster_in_place_whatever_becomes_of_numbers_of_pods():
    found = change(edited(append, put("ingress.maxReplicas", 7)))
    assert found == Change("in place", appended=["ingress-2", "decode-2"])


def test_appended_group_beside_another_change_needs_a_second_cluster():
    assert change(edited(append, put("decode.labels.zone", "a"))).way == "second cluster"


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("NewCluster", "second cluster"),
        ("NewClusterWithIncrementalUpgrade", "in steps"),
        ("None", "refused"),
        (GONE, "second cluster"),
    ],
)
def test_upgrade_strategy_says_how_the_cluster_is_replaced(strategy, way):
    new = edited(put("spec.upgradeStrategy.type", strategy), put("cluster.rayVersion", "3.0.0"))
    assert change(new).way == way


def test_second_cluster_takes_twice_the_pods():
    found = pods(edited(put("cluster.rayVersion", "3.0.0")))
    assert found.before == found.after == {"head": 1, "ingress": 2, "decode": 4}
    assert found.during == {"head": 2, "ingress": 4, "decode": 8}


def test_steps_take_a_second_head_and_a_share_of_the_replicas():
    options = {"maxSurgePercent": 50, "stepSizePercent": 50, "intervalSeconds": 60, "gatewayClassName": "x"}
    strategy = {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": options}
    new = edited(put("cluster.rayVersion", "3.0.0"), put("spec.upgradeStrategy", strategy))
    assert pods(new).during == {"head": 2, "ingress": 4, "decode": 6}  # ingresses: minReplicas in each


def test_a_roll_takes_one_replica_more_and_leaves_no_pod_to_the_version_before():
    old, new = edited(labelled), edited(roll)
    found = pods(new, old)
    assert found.before == {"head": 1, "ingress": 2, "decode": 4}
    assert found.during == found.before | {"ingress-2": 1, "decode-2": 2}
    assert +found.after == {"head": 1, "ingress-2": 1, "decode-2": 4}
    assert [gpus(each, service(new).groups) for each in (found.before, found.during, found.after)] == [4, 6, 4]


def test_the_way_back_changes_only_the_serve_configuration_and_takes_one_replica_more():
    back = edited(roll, lambda deployed: serves(deployed, "1"))
    found, counts = change(back, edited(roll)), pods(back, edited(roll))
    assert found == Change("nothing", reconfigured=True)
    assert (counts.before["decode-2"], counts.before["decode"]) == (4, 0)
    assert (counts.during["decode-2"], counts.during["decode"]) == (4, 2)
    assert (counts.after["decode-2"], counts.after["decode"]) == (0, 4)


def test_a_roll_without_a_surge_still_needs_a_pod_of_the_new_version():
    def without(deployed: Deployed) -> None:
        del deployed.serve["applications"][0]["deployments"][1]

    assert pods(edited(roll, without), edited(labelled, without)).during["decode-2"] == 2


def test_groups_that_do_not_scale_have_all_their_pods_at_all_times():
    fixed = put("cluster.enableInTreeAutoscaling", False)
    old, new = edited(fixed), edited(fixed, put(f"{ENGINE}.decode.max_replicas", 1))
    assert pods(new, old).after == {"head": 1, "ingress": 2, "decode": 2}


def test_the_command_tells_the_cost_of_a_change_beside_mistakes(tmp_path):
    files: dict[str, str] = {}
    for name, deployed in {"old": edited(labelled), "new": edited(roll)}.items():
        files[name] = str(tmp_path / f"{name}.yaml")
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(deployed.manifests()))
    result = CliRunner().invoke(app, ["k8s", "lint", files["new"], "--before", files["old"]])
    assert result.exit_code == 0, result.output
    first, *others = result.stdout.splitlines()
    assert first == "RayService manta: its RayCluster changes in place: KubeRay appends ingress-2, decode-2"
    rows = [line.strip("│ ").split("│") for line in others if line.startswith("│")]
    assert ["GPUs", "4", "6", "4"] in [[cell.strip() for cell in row] for row in rows]


def test_manifests_of_another_service_are_refused():
    other: Manifest = {"kind": "RayService", "metadata": {"name": "other", "labels": OURS}, "spec": Deployed().spec}
    with pytest.raises(StartupError, match="no RayService is in both"):
        costs([other], Deployed().manifests())
