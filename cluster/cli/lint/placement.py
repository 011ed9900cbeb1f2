"""Whether the pods of a RayService can hold the replicas of its Serve configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.cli.lint.manifests import Manifest, Service
from deployments.ray_compat import INGRESS
from placement.capacity import EPSILON, matches, missing
from placement.spec import GroupSpec

Complaints = Iterator[tuple[str, str]]


@dataclass(slots=True)
class Room:
    """What is left of a pod."""

    free: dict[str, float]
    labels: Mapping[str, str]

    def take(self, bundle: Mapping[str, float], selector: Mapping[str, str]) -> bool:
        if not matches(self.labels, selector):
            return False
        if any(self.free.get(resource, 0.0) + EPSILON < amount for resource, amount in bundle.items()):
            return False
        for resource, amount in bundle.items():
            self.free[resource] -= amount
        return True


@dataclass(frozen=True, slots=True)
class Deployment:
    """spec: of one replica. An ingress has no ranks; it is one bundle all the same."""

    name: str
    spec: GroupSpec
    max_replicas: int

    @property
    def bundles(self) -> list[dict[str, float]]:
        return self.spec.bundles


def deployments(service: Service) -> list[Deployment]:
    """The largest first: that is how they are placed below."""
    found = []
    for app, config in service.apps:
        options = _ingress_options(app)
        cpus = float(options.get("num_cpus", config.ingress.num_cpus))
        spec = GroupSpec(num_cpus=cpus, control_cpus=0.0, label_selector=options.get("label_selector") or {})
        found.append(Deployment(INGRESS, spec, config.ingress.num_replicas))
        for model in config.models:
            for role, pool in model.pools.items():
                found.append(Deployment(f"{role}-{model.name}", model.group_spec(role), pool.bounds[1]))
    return sorted(found, key=lambda found: (found.spec.num_gpus, found.spec.num_cpus), reverse=True)


def _ingress_options(app: Manifest) -> Manifest:
    for override in app.get("deployments") or []:
        if override.get("name") == INGRESS:
            options: Manifest = override.get("ray_actor_options") or {}
            return options
    return {}


def bundles_that_fit_no_pod(service: Service) -> Complaints:
    """One replica of each deployment alone, with all pods that there may ever be."""
    nodes = service.nodes()
    for deployment in deployments(service):
        if (problem := missing(deployment.spec, nodes)) is not None:
            yield service.name, f"{deployment.name}: {problem}"


def more_replicas_than_pods_can_hold(service: Service) -> Complaints:
    """All replicas together, each bundle in the first pod that has room: Serve would wait for more pods for ever."""
    nodes = service.nodes()
    rooms = [Room(dict(node.resources), node.labels) for node in nodes]
    for deployment in deployments(service):
        if missing(deployment.spec, nodes) is not None:
            continue  # bundles-fit says so
        for placed in range(deployment.max_replicas):
            if not all(_place(bundle, deployment.spec, rooms) for bundle in deployment.bundles):
                most = deployment.max_replicas
                yield service.name, f"{deployment.name} may grow to {most} replicas, but the pods hold {placed} of them"
                break


def _place(bundle: Mapping[str, float], spec: GroupSpec, rooms: list[Room]) -> bool:
    if spec.accelerator_type is not None:
        bundle = {name: amount for name, amount in bundle.items() if not name.startswith("accelerator_type:")}
        rooms = [room for room in rooms if f"accelerator_type:{spec.accelerator_type}" in room.free]
    # pods without GPUs first, so that what needs none leaves them alone
    return any(
        room.take(bundle, spec.label_selector) for room in sorted(rooms, key=lambda room: room.free.get("GPU", 0))
    )
