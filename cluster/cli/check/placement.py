"""Places the replicas of a configuration on nodes, or on pods that will become nodes, to check whether they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.app_config import AppConfig
from deployments.ray_compat import INGRESS
from placement.capacity import EPSILON, Node, matches, missing
from placement.spec import GroupSpec


@dataclass(frozen=True, slots=True)
class Deployment:
    name: str
    spec: GroupSpec  #: resources of one replica
    min_replicas: int
    max_replicas: int


def deployments_of(config: AppConfig, overrides: Sequence[Mapping[str, Any]] = ()) -> list[Deployment]:
    """Return all deployments of an application. overrides: its `deployments` section."""
    given = {override["name"]: override for override in overrides}
    options, count = given.get(INGRESS, {}).get("ray_actor_options") or {}, config.ingress.num_replicas
    cpus, labels = float(options.get("num_cpus", config.ingress.num_cpus)), options.get("label_selector") or {}
    spec = GroupSpec(num_cpus=cpus, control_cpus=0.0, label_selector=labels)
    found = [Deployment(INGRESS, spec, *_bounds(given.get(INGRESS, {}), (count, count)))]
    for model in config.models:
        for name, role in model.deployments.items():
            found.append(Deployment(name, model.group_spec(role), *_bounds(given.get(name, {}), model.bounds(role))))
    return found


def _bounds(override: Mapping[str, Any], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the minimum and maximum number of replicas: those of `override`, where it has them, else `bounds`."""
    if isinstance(count := override.get("num_replicas"), int):
        return count, count
    scaling = override.get("autoscaling_config") or {}
    return int(scaling.get("min_replicas", bounds[0])), int(scaling.get("max_replicas", bounds[1]))


@dataclass(slots=True)
class FreeNode:
    resources: dict[str, float]  #: resources that no replica has taken
    labels: Mapping[str, str]

    def take(self, bundle: Mapping[str, float], selector: Mapping[str, str]) -> bool:
        """Reserve a bundle. Returns False if it does not fit."""
        fits = all(self.resources.get(name, 0.0) + EPSILON >= amount for name, amount in bundle.items())
        if not fits or not matches(self.labels, selector):
            return False
        for name, amount in bundle.items():
            self.resources[name] -= amount
        return True


def place(wanted: Mapping[str, int], deployments: Sequence[Deployment], nodes: Sequence[Node]) -> dict[str, int]:
    """Return how many of the wanted replicas of each deployment fit on the nodes together.

    The largest replicas are placed first. Each of their bundles goes to the first node with enough resources left.
    """
    # nodes without GPUs first, so that bundles without GPUs do not take the others
    free = sorted((FreeNode(dict(n.resources), n.labels) for n in nodes), key=lambda node: node.resources.get("GPU", 0))
    placed = dict.fromkeys(wanted, 0)
    for deployment in sorted(deployments, key=lambda d: (d.spec.num_gpus, d.spec.num_cpus), reverse=True):
        name, spec = deployment.name, deployment.spec
        if missing(spec, nodes) is None:  # else not even one replica fits
            while placed[name] < wanted[name] and all(
                any(node.take(bundle, spec.label_selector) for node in free) for bundle in spec.bundles
            ):
                placed[name] += 1
    return placed
