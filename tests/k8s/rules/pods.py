"""Rules about the pods of a RayService and what stands beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from cluster.cli.lint.manifests import Group, Manifest, Service, quantity
from cluster.cli.lint.violation import Violation
from tests.k8s.rules.network import redis_address
from tests.k8s.rules.selectors import pod_labels, selects

GIB = 1024.0**3
RAY_GIB = 1.0  # what Ray's own processes take in a pod that does nothing
LONGEST_NAME = 47  # of a RayService: names of pods and Services are made from it
NO_EVICTION = 100  # minAvailable of a budget: more pods than there ever are, also while clusters change
UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")


def refused(service: Service) -> Iterator[Violation]:
    """What the operator refuses, by no more than an event of the RayService."""
    name, options = service.metadata["name"], service.cluster.get("autoscalerOptions") or {}
    if not re.fullmatch(rf"[a-z]([-a-z0-9]{{,{LONGEST_NAME - 2}}}[a-z0-9])?", name):
        message = f"metadata.name must have at most {LONGEST_NAME} of a-z, 0-9 and -, and begin with a letter"
        yield Violation("operator-refuses", service.name, f"{message}, got {len(name)}")
    if (service.cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
        yield Violation("operator-refuses", service.name, "authOptions.enableK8sTokenAuth is not for a RayService")
    if (upgrade := (service.spec.get("upgradeStrategy") or {}).get("type", UPGRADES[0])) not in UPGRADES:
        message = f"upgradeStrategy.type must be one of {', '.join(UPGRADES)}, got {upgrade}"
        yield Violation("operator-refuses", service.name, message)
    names = [group.spec["groupName"] for group in service.groups[1:]]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = (
            f"groupName {name} stands there {names.count(name)} times, so the pods of one group count as another's"
        )
        yield Violation("group-names", service.name, message)
    if service.autoscales and options.get("version", "v2") == "v2":
        for group in service.groups:
            if (policy := group.pod.get("restartPolicy", "Never")) != "Never":
                message = f"restartPolicy must be Never or not given with autoscaler v2, got {policy}"
                yield Violation("operator-refuses", group.where, message)


def head(service: Service) -> Iterator[Violation]:
    """The operator and the autoscaler work through the head."""
    group = service.groups[0]
    if (host := group.start_params.get("dashboard-host", "0.0.0.0")) in ("127.0.0.1", "localhost", "::1"):
        message = (
            f"dashboard-host must be 0.0.0.0, got {host}: the operator could not put the Serve configuration there"
        )
        yield Violation("dashboard-host", group.where, message)
    if service.autoscales and group.pod.get("automountServiceAccountToken") is False:
        message = "automountServiceAccountToken must not be false: the autoscaler asks the API server for pods"
        yield Violation("autoscaler-token", group.where, message)


def redis(service: Service) -> Iterator[Violation]:
    """Ray's control store must be there, and its password is for nobody's eyes."""
    if redis_address(service) is None:
        return
    host, names = redis_address(service)[0], [m["metadata"]["name"] for m in service.of_kind("Service")]
    if "." not in host and host not in names:
        message = f"redisAddress names {host}, but no Service has that name, so the GCS cannot start"
        yield Violation("redis", service.name, message)
    if (service.cluster["gcsFaultToleranceOptions"].get("redisPassword") or {}).get("value"):
        yield Violation(
            "redis", service.name, "redisPassword must come from a Secret (valueFrom), got a value in clear"
        )


def memory(service: Service) -> Iterator[Violation]:
    """Ray's object store is in /dev/shm, which counts as memory of the container."""
    for group in service.groups:
        limits = (group.main.get("resources") or {}).get("limits") or {}
        store = quantity(group.start_params.get("object-store-memory", 0), f"{group.where}: object-store-memory")
        limit = quantity(limits["memory"], f"{group.where}: limits.memory") if "memory" in limits else math.inf
        if limit < store + RAY_GIB * GIB:
            message = f"memory must be at least object-store-memory and {RAY_GIB:g} GiB for Ray itself"
            yield Violation(
                "memory", group.where, f"{message} ({store / GIB + RAY_GIB:.2f} GiB), got {limit / GIB:.2f}"
            )
        if (size := _shared_memory(group)) is not None and size < store:
            message = (
                f"the volume on /dev/shm must hold object-store-memory ({store / GIB:.2f} GiB), got {size / GIB:.2f}"
            )
            yield Violation("memory", group.where, f"{message}: Ray would keep objects on disk")


def gpu_kind(service: Service) -> Iterator[Violation]:
    """Ray's label says what the node has; Kubernetes chooses the node."""
    for group in service.groups:
        kind = (group.spec.get("labels") or {}).get("ray.io/accelerator-type")
        product = (group.pod.get("nodeSelector") or {}).get("nvidia.com/gpu.product")
        # as in "A100-40G" and "NVIDIA-A100-SXM4-40GB"
        if kind and product and kind.split("-")[0] not in product.split("-"):
            message = f"the label ray.io/accelerator-type is {kind}, but nodeSelector asks for {product}"
            yield Violation("gpu-kind", group.where, message)


def claims(service: Service) -> Iterator[Violation]:
    """Weights are mounted by every pod, on whatever node it is."""
    modes = {
        m["metadata"]["name"]: m["spec"].get("accessModes") or [] for m in service.of_kind("PersistentVolumeClaim")
    }
    for name, given in modes.items():
        pods = sum(service.max_pods(group) for group in service.groups if name in _claims_of(group.pod))
        if pods > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(given):
            message = f"up to {pods} pods mount it, so accessModes must have ReadWriteMany, got {', '.join(given)}"
            yield Violation("shared-volume", f"PersistentVolumeClaim {name}", message)


def budgets(service: Service) -> Iterator[Violation]:
    """A budget keeps one pod where each is a replica, and all where the loss of one is the loss of more: of the head,
    and of replicas on several pods. While clusters change, it counts the pods of all of them."""
    for budget in service.of_kind("PodDisruptionBudget"):
        groups = [group for group in service.groups if selects(budget["spec"].get("selector"), pod_labels(group))]
        if not groups:
            continue
        where, least = f"PodDisruptionBudget {budget['metadata']['name']}", budget["spec"].get("minAvailable")
        pods = sum(service.max_pods(group) for group in groups)
        if not isinstance(least, int):
            message = "must have minAvailable, a number: pods of a RayCluster have no scale subresource"
            yield Violation("disruption-budget", where, message)
        elif any(group.is_head or group.spec.get("numOfHosts", 1) > 1 for group in groups):
            if least != NO_EVICTION:
                message = f"minAvailable must be {NO_EVICTION}, so that no pod is evicted, got {least}"
                yield Violation("disruption-budget", where, message)
        elif least > pods:
            message = f"minAvailable must be at most the {pods} pods that there may be, got {least}"
            yield Violation("disruption-budget", where, message)


def _shared_memory(group: Group) -> float | None:
    """Return the bytes of the volume on /dev/shm; None without one, or without a limit of its own."""
    mounted = {mount["name"] for mount in group.main.get("volumeMounts") or [] if mount["mountPath"] == "/dev/shm"}
    for volume in group.pod.get("volumes") or []:
        if volume["name"] in mounted and "sizeLimit" in (volume.get("emptyDir") or {}):
            return quantity(volume["emptyDir"]["sizeLimit"], f"{group.where}: sizeLimit of /dev/shm")
    return None


def _claims_of(pod: Manifest) -> set[str]:
    return {(volume.get("persistentVolumeClaim") or {}).get("claimName", "") for volume in pod.get("volumes") or []}
