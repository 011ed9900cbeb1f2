"""Rules about pods, whatever runs in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from cluster.cli.lint.manifests import Group, Manifest, Pods

SECRET_NAME = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY|_KEY)$")
RDMA = ("rdma/", "vpc.amazonaws.com/efa")


def unpinned_image(pods: Pods) -> Iterator[str]:
    for container in pods.containers:
        image = str(container.get("image", ""))
        tag = image.rsplit("/", 1)[-1].partition(":")[2]
        if "@sha256:" not in image and tag in ("", "latest"):
            yield f"image {image!r} must have a digest, or a tag other than latest"


def restricted(pods: Pods) -> Iterator[str]:
    """Kubernetes' level `restricted`, and a root file system that nobody writes."""
    pod = pods.spec.get("securityContext") or {}
    for container in pods.containers:
        name, own = container.get("name"), container.get("securityContext") or {}
        both: Manifest = {**pod, **own}
        capabilities = own.get("capabilities") or {}
        wrong = {
            "runAsNonRoot": (both.get("runAsNonRoot"), True),
            "seccompProfile.type": ((both.get("seccompProfile") or {}).get("type"), "RuntimeDefault"),
            "allowPrivilegeEscalation": (own.get("allowPrivilegeEscalation"), False),
            "readOnlyRootFilesystem": (own.get("readOnlyRootFilesystem"), True),
            "capabilities.drop": (capabilities.get("drop"), ["ALL"]),
        }
        for key, (got, wanted) in wrong.items():
            if got != wanted:
                yield f"container {name}: securityContext.{key} must be {wanted}, got {got}"
        allowed = {"IPC_LOCK"} if _uses_rdma(container) else set()
        if added := set(capabilities.get("add") or []) - allowed:
            yield f"container {name}: securityContext.capabilities.add must not have {', '.join(sorted(added))}"


def host_path(pods: Pods) -> Iterator[str]:
    for volume in pods.spec.get("volumes") or []:
        if "hostPath" in volume:
            yield f"volume {volume['name']} must not be a hostPath: the level `restricted` refuses it"


def no_place_for_tmp(pods: Pods) -> Iterator[str]:
    """Ray writes to /tmp."""
    if isinstance(pods, Group) and "/tmp" not in [m["mountPath"] for m in pods.main.get("volumeMounts") or []]:
        yield "no volume is mounted on /tmp, where Ray writes"


def gpu_scheduling(pods: Pods) -> Iterator[str]:
    if not pods.gpus:
        return
    tolerated = [toleration.get("key") for toleration in pods.spec.get("tolerations") or []]
    if "nvidia.com/gpu" not in tolerated:
        yield "no toleration for nvidia.com/gpu, with which GPU nodes keep other pods away"
    if not pods.spec.get("nodeSelector") and not (pods.spec.get("affinity") or {}).get("nodeAffinity"):
        yield "no nodeSelector: with more than one kind of GPU in the cluster, any of them may be taken"


def ray_resources(pods: Pods) -> Iterator[str]:
    """What Ray hands out and what the pod has."""
    if not isinstance(pods, Group) or "groupName" not in pods.spec_:
        return
    gpus, cpus = pods.node.resources["GPU"], pods.node.resources["CPU"]
    if gpus != pods.gpus:
        yield f"Ray is told of {gpus:g} GPUs, but the pod has {pods.gpus:g}"
    requested = pods.resource("cpu", of=("requests", "limits"))
    if cpus > requested:
        yield f"Ray is told of {cpus:g} CPUs, but the pod asks for {requested:g}"


def memory_not_guaranteed(pods: Pods) -> Iterator[str]:
    request, limit = pods.resource("memory", of=("requests",)), pods.resource("memory", of=("limits",))
    if not limit or request != limit:
        yield "memory requests and limits must be the same, or a busy node ends the pod"


def secret_in_clear(pods: Pods) -> Iterator[str]:
    for container in pods.containers:
        for entry in container.get("env") or []:
            if SECRET_NAME.search(entry["name"]) and entry.get("value"):
                yield f"{entry['name']} must come from a Secret (valueFrom), not stand in the manifest"


def _uses_rdma(container: Manifest) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return any(name.startswith(RDMA) for name in limits)


RULES: dict[str, Callable[[Pods], Iterator[str]]] = {
    "unpinned-image": unpinned_image,
    "restricted": restricted,
    "host-path": host_path,
    "tmp-volume": no_place_for_tmp,
    "gpu-scheduling": gpu_scheduling,
    "ray-resources": ray_resources,
    "memory": memory_not_guaranteed,
    "secret-in-clear": secret_in_clear,
}
