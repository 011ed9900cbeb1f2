"""Each overlay, as kustomize renders it, follows the schemas, the rules for manifests, and more about its pods."""

from __future__ import annotations

import copy
import re
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from cluster import ray_environment
from cluster.cli.lint.manifests import Manifest, Service, quantity
from cluster.config.app_config import AppConfig
from cluster.entry_point import BUILDER
from deployments.drain import orphaned_node
from tests.k8s import crds
from tests.k8s.overlays import (
    GONE,
    OVERLAYS,
    ROOT,
    containers,
    every_overlay,
    needs_kustomize,
    of_kind,
    pods,
    put,
    ray_groups,
    ray_service,
    rendered,
)
from tests.k8s.rules.every_rule import violations

KUBERNETES = "1.37"


@every_overlay
def test_serve_configuration_of_an_overlay_is_one_that_we_can_parse(overlay):
    applications = yaml.safe_load((overlay / "serve_config.yaml").read_text())["applications"]
    for application in applications:
        assert application["import_path"] == BUILDER
        AppConfig.parse(application["args"])


@needs_kustomize
@every_overlay
def test_ray_service_carries_the_text_that_serve_run_reads(overlay):
    assert ray_service(rendered(overlay))["spec"]["serveConfigV2"] == (overlay / "serve_config.yaml").read_text()


@needs_kustomize
@every_overlay
def test_built_in_kinds_of_an_overlay_follow_their_schemas(overlay):
    built_in = [m for m in rendered(overlay) if (m["apiVersion"], m["kind"]) not in crds.kinds()]
    assert {"Namespace", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"} <= {m["kind"] for m in built_in}
    for manifest in built_in:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@needs_kustomize
@every_overlay
def test_custom_resources_of_an_overlay_follow_their_schemas(overlay):
    custom = [m for m in rendered(overlay) if (m["apiVersion"], m["kind"]) in crds.kinds()]
    assert "RayService" in {m["kind"] for m in custom}
    assert [error for manifest in custom for error in crds.errors(manifest)] == []


@needs_kustomize
@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("rayClusterConfig.workerGroupSpecs.0.maxReplica", 1, "'maxReplica' was unexpected"),
        ("rayClusterConfig.workerGroupSpecs.0.maxReplicas", "2", "is not of type 'integer'"),
        ("rayClusterConfig.headGroupSpec.template.spec.containers", GONE, "'containers' is a required property"),
        ("rayClusterConfig.authOptions.mode", "open", "is not one of"),
    ],
)
def test_mistake_in_a_ray_service_is_seen_by_the_schema_of_kuberay(path, value, says):
    service = copy.deepcopy(ray_service(rendered(OVERLAYS[0])))
    put(service["spec"], path, value)
    (error,) = crds.errors(service)
    assert says in error


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
def test_no_rule_finds_anything_in_an_overlay(overlay):
    assert [str(violation) for violation in violations(rendered(overlay))] == []


def broken_controls(pod: Manifest) -> set[str]:
    """Return the controls of the level `restricted` (Pod Security Standards) that a pod breaks."""
    own = [pod, *pod.get("initContainers", []), *pod["containers"]]
    contexts = [part.get("securityContext", {}) for part in own]
    merged = [contexts[0] | context for context in contexts[1:]]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    broken = {
        "host": any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
        "hostPorts": any(port.get("hostPort") for part in own[1:] for port in part.get("ports", [])),
        "volumes": any(not (volume.keys() - {"name"}) <= allowed for volume in pod.get("volumes", [])),
        "privileged": any(context.get("privileged") for context in contexts),
        "escalation": any(context.get("allowPrivilegeEscalation") is not False for context in contexts[1:]),
        "nonRoot": any(context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0 for context in merged),
        "seccomp": any(
            context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost") for context in merged
        ),
        "capabilities": any(context.get("capabilities") != {"drop": ["ALL"]} for context in contexts[1:]),
        "kernel": any(
            context.get("sysctls") or context.get("procMount", "Default") != "Default" for context in contexts
        ),
    }
    return {control for control, is_broken in broken.items() if is_broken}


@needs_kustomize
@every_overlay
def test_pods_of_an_overlay_keep_the_level_that_their_namespace_enforces(overlay):
    """Also those with RDMA: IPC_LOCK is of no effect for a user that is not root."""
    (namespace,) = of_kind("Namespace", rendered(overlay))
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(rendered(overlay)):
        assert broken_controls(pod) == set()
    for container, _ in containers(rendered(overlay)):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


@needs_kustomize
@pytest.mark.parametrize(
    ("control", "change"),
    [
        ("host", {"hostNetwork": True}),
        ("volumes", {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}),
        ("nonRoot", {"securityContext": {"runAsUser": 0}}),
        ("seccomp", {"securityContext": {"runAsNonRoot": True}}),
    ],
)
def test_pod_that_breaks_a_control_is_seen(control, change):
    pod = next(pods(rendered(OVERLAYS[0])))
    assert control in broken_controls(pod | change)


@pytest.mark.parametrize(
    ("control", "change"),
    [
        ("privileged", {"privileged": True}),
        ("nonRoot", {"runAsUser": 0}),
        ("capabilities", {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}),
        ("escalation", {"allowPrivilegeEscalation": True}),
    ],
)
@needs_kustomize
def test_container_that_breaks_a_control_is_seen(control, change):
    pod = next(pods(rendered(OVERLAYS[0])))
    first, *rest = pod["containers"]
    changed = first | {"securityContext": first["securityContext"] | change}
    assert broken_controls(pod | {"containers": [changed, *rest]}) == {control}


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
        assert float(ray.get("num-cpus", 0)) <= quantity(resources["requests"]["cpu"], "cpu")
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
        assert ray_environment.FRONT.items() <= group.env.items()
        mounts = {Path(mount["mountPath"]) for mount in group.main["volumeMounts"]}
        folders = [m.model for m in config.models if m.model.startswith("/")]
        for path in [*folders, config.ingress.api_keys_file or "", config.ingress.batch_dir or ""]:
            assert not path or mounts & {Path(path), *Path(path).parents}, (group.where, path)


# As KubeRay 1.7.0 makes it for workers of a RayService that have none (initLivenessAndReadinessProbe in pod.go).
KUBERAY_PROBE = {
    "exec": {
        "command": [
            "bash",
            "-c",
            "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"
            " && wget --tries 1 -T 10 -q -O- http://localhost:8000/-/healthz | grep success",
        ]
    },
    "initialDelaySeconds": 10,
    "timeoutSeconds": 2,
    "periodSeconds": 5,
    "failureThreshold": 1,
}


@needs_kustomize
@every_overlay
def test_workers_of_an_overlay_are_asked_each_second_what_kuberay_would_ask_every_five(overlay):
    """KubeRay moves the Service to a new cluster without a look at its pods: until they are Ready, clients are
    refused."""
    for group in ray_service(rendered(overlay))["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        probe = group["template"]["spec"]["containers"][0]["readinessProbe"]
        assert probe == KUBERAY_PROBE | {"periodSeconds": 1, "failureThreshold": 3}


@needs_kustomize
@every_overlay
def test_workers_of_an_overlay_are_told_that_their_pod_ends(overlay):
    manifests = rendered(overlay)
    for group in Service(ray_service(manifests), manifests).groups[1:]:
        assert group.main["lifecycle"]["preStop"]["exec"]["command"] == [
            "mkdir",
            "-p",
            group.env[orphaned_node.VARIABLE],
        ]


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
    assert opened[8265] == [{"namespaceSelector": {"matchLabels": {"manta/operator": "allowed"}}}]
    assert {"namespaceSelector": {"matchLabels": {"manta/clients": "allowed"}}} in opened[8000]


@needs_kustomize
@every_overlay
def test_namespaces_that_reach_an_overlay_have_a_label_that_the_readme_tells_to_set(overlay):
    """Names of namespaces, and labels of pods of others, depend on how they were installed."""
    readme = (ROOT / "k8s" / "README.md").read_text()
    for policy in of_kind("NetworkPolicy", rendered(overlay)):
        for rule in policy["spec"].get("ingress", []):
            for selector in (peer["namespaceSelector"] for peer in rule["from"] if "namespaceSelector" in peer):
                ((label, value),) = selector["matchLabels"].items()
                assert label.startswith("manta/")
                assert f"{label}={value}" in readme


@needs_kustomize
@every_overlay
def test_pods_of_an_overlay_ask_for_names_wherever_these_are_answered(overlay):
    """CoreDNS is not always a pod of kube-system: NodeLocal DNSCache is on the node, and OpenShift has its own port."""
    names = {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)}
    for template in (group["template"] for group in ray_groups(rendered(overlay)).values()):
        anywhere = [
            {(entry["protocol"], entry["port"]) for entry in rule["ports"]}
            for policy in of_kind("NetworkPolicy", rendered(overlay))
            if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= template["metadata"]["labels"].items()
            for rule in policy["spec"].get("egress", [])
            if "to" not in rule
        ]
        assert any(names <= ports for ports in anywhere)


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
def test_prometheus_operator_takes_the_monitors_and_rules_of_an_overlay(overlay):
    """The operator, as kube-prometheus-stack installs it, takes only those with the name of its release."""
    for manifest in of_kind("PodMonitor", rendered(overlay)) + of_kind("PrometheusRule", rendered(overlay)):
        assert manifest["metadata"]["labels"]["release"] == "kube-prometheus-stack"


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


def budgets_of_pools(manifests: list[Manifest]) -> dict[str, Manifest]:
    budgets = [manifest["spec"] for manifest in of_kind("PodDisruptionBudget", manifests)]
    labelled = [(budget["selector"]["matchLabels"].get("manta/pool"), budget) for budget in budgets]
    return {pool: budget for pool, budget in labelled if pool is not None}


@needs_kustomize
@every_overlay
def test_budget_of_a_pool_keeps_one_pod_where_each_is_a_replica_and_else_all(overlay):
    """Of a head or of a replica on several pods, none may go. Three clusters may be there at once, each with its head:
    one that serves, one that ends, and one that begins."""
    manifests = rendered(overlay)
    least = {pool: budget["minAvailable"] for pool, budget in budgets_of_pools(manifests).items()}
    groups = ray_service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert least.keys() == {"head", *(group["groupName"] for group in groups)}
    most = {"head": 1} | {g["groupName"]: g["maxReplicas"] * g["numOfHosts"] for g in groups if "numOfHosts" in g}
    assert {pool: number for pool, number in least.items() if pool not in most} == dict.fromkeys(least.keys() - most, 1)
    for pool, of_one_cluster in most.items():
        assert least[pool] > 3 * of_one_cluster
        assert "unhealthyPodEvictionPolicy" not in budgets_of_pools(manifests)[pool]  # AlwaysAllow: ranks work NotReady


@needs_kustomize
@every_overlay
def test_head_of_an_overlay_goes_quickly(overlay):
    """It holds no stream, and no other head can start before it has gone."""
    manifests = rendered(overlay)
    head = Service(ray_service(manifests), manifests).groups[0]
    drain_s = float(head.env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert drain_s < head.pod["terminationGracePeriodSeconds"] <= 60


@needs_kustomize
def test_pods_with_nothing_but_ingresses_do_not_gather_on_one_machine():
    (overlay,) = [overlay for overlay in OVERLAYS if overlay.name == "pd-disagg"]
    template = ray_groups(rendered(overlay))["ingress"]["template"]
    (spread,) = template["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@needs_kustomize
@every_overlay
def test_pods_that_serve_an_overlay_have_a_priority_that_pushes_nobody_out(overlay):
    manifests = rendered(overlay)
    (priority,) = of_kind("PriorityClass", manifests)
    assert priority["preemptionPolicy"] == "Never"
    templates = [group["template"] for group in ray_groups(manifests).values()]
    for template in [*templates, *(m["spec"]["template"] for m in of_kind("StatefulSet", manifests))]:
        assert template["spec"]["priorityClassName"] == priority["metadata"]["name"]


@needs_kustomize
@every_overlay
def test_ray_pods_of_an_overlay_ask_for_the_disk_that_they_may_fill(overlay):
    """A limit of an emptyDir evicts, but no node is chosen by it."""
    for group in ray_groups(rendered(overlay)).values():
        pod = group["template"]["spec"]
        (tmp,) = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "tmp"]
        asked = pod["containers"][0]["resources"]["requests"]["ephemeral-storage"]
        assert asked == ("1Gi" if overlay.name == "cpu-demo" else tmp)  # kind has no disk of its own


@needs_kustomize
@every_overlay
def test_config_maps_that_pods_of_an_overlay_name_outlive_the_next_sync(overlay):
    """Their names change with what they say, and pods of the old cluster of an upgrade may start once more."""
    manifests = rendered(overlay)
    named = {source["configMapRef"]["name"] for c, _ in containers(manifests) for source in c.get("envFrom", [])}
    for config_map in of_kind("ConfigMap", manifests):
        if config_map["metadata"]["name"] in named:
            assert config_map["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == "Prune=false"
            assert config_map["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/prune"] == "disabled"


@needs_kustomize
@every_overlay
def test_network_between_gpus_of_an_overlay_is_named_in_one_place(overlay):
    manifests = rendered(overlay)
    fabric = {
        name
        for config_map in of_kind("ConfigMap", manifests)
        if config_map["metadata"]["name"].startswith("manta-fabric-")
        for name in config_map["data"]
    }
    for group in Service(ray_service(manifests), manifests).groups:
        assert not [entry for entry in group.main.get("env", []) if entry["name"].startswith(("NCCL_", "UCX_"))]
        rdma = [name for name in group.main["resources"]["requests"] if name.startswith("rdma/")]
        spans = rdma or group.spec.get("numOfHosts", 1) > 1  # the ranks of a replica are on several machines
        assert fabric <= group.env.keys() if spans else not fabric & group.env.keys()


@needs_kustomize
@every_overlay
def test_pods_of_an_overlay_whose_replica_spans_machines_come_near_each_other_and_hold_no_ingress(overlay):
    manifests = rendered(overlay)
    groups = ray_service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for group in [group for group in groups if group.get("numOfHosts", 1) > 1]:
        affinity = group["template"]["spec"]["affinity"]["podAffinity"]
        (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert preferred["podAffinityTerm"]["matchLabelKeys"] == ["ray.io/worker-group-replica-name"]
        (app,) = yaml.safe_load((overlay / "serve_config.yaml").read_text())["applications"]
        (ingress,) = app["deployments"]
        assert ingress["name"] == "ingress"
        assert not ingress["ray_actor_options"]["label_selector"].items() <= group["labels"].items()
