"""How many pods a RayService has at most before, during and after a change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal

from cluster.cli.check.placement import Deployment, FreeNode, deployments_of
from cluster.cli.lint.change import Change
from cluster.cli.lint.manifests import Group, Service
from deployments.ray_compat import INGRESS

Counts = Counter[str]
"""Pods by the names of groups."""


@dataclass(frozen=True, slots=True)
class Pods:
    before: Counts
    during: Counts
    after: Counts


def pods_of(old: Service, new: Service, change: Change) -> Pods:
    """Return the pods at the greatest load that the Serve configuration allows. What a pod of Redis, or of another
    object takes, is not in it."""
    before = needed(old, old.groups, replicas_of(old))
    if change.way in ("nothing", "refused"):
        during = needed(old, old.groups, [*replicas_of(old), *_spare(new, change)])
        return Pods(before, before | during, needed(old, old.groups, replicas_of(new)))
    after = needed(new, new.groups, replicas_of(new))
    if change.way == "in place":
        during = needed(new, new.groups, [*replicas_of(old), *_spare(new, change)], starts=change.appended)
        return Pods(before, before | during, after)
    if change.way == "second cluster":
        return Pods(before, before + after, after)
    steps = [_scaled(old, kept) + _scaled(new, grown) for kept, grown in _steps(new)]
    return Pods(before, max(steps, key=lambda counts: counts.total()), after)


def replicas_of(service: Service) -> list[Deployment]:
    return [d for app, config in service.apps for d in deployments_of(config, app.get("deployments") or [])]


def _spare(new: Service, change: Change) -> Iterator[Deployment]:
    """Yield what is started before what it replaces ends: all ingresses, and of other deployments max_surge_percent.
    Without it an old replica ends first, but pods that it leaves are of no use to one that needs another pod."""
    if not change.reconfigured:
        return
    given = {each["name"]: each for app, _ in new.apps for each in app.get("deployments") or []}
    for deployment in replicas_of(new):
        surge = given.get(deployment.name, {}).get("max_surge_percent", 100 if deployment.name == INGRESS else 0)
        count = math.ceil(surge * deployment.max_replicas / 100)
        yield replace(deployment, max_replicas=max(count, 1) if change.appended else count)


def needed(
    service: Service, groups: Sequence[Group], deployments: Sequence[Deployment], starts: Sequence[str] = ()
) -> Counts:
    """Return the pods that hold all replicas of these deployments, or as many of them as the groups may have, and at
    least as many as the groups have without any. starts: names of groups that begin with `replicas`."""
    free = [
        (name_of(group), FreeNode(dict(group.node.resources), group.node.labels), group)
        for group in groups
        for _ in range(service.max_pods(group))
    ]
    free.sort(key=lambda each: each[1].resources.get("GPU", 0))  # bundles without GPUs leave others to the rest
    taken: set[int] = set()
    for deployment in sorted(deployments, key=lambda d: (d.spec.num_gpus, d.spec.num_cpus), reverse=True):
        for bundle in deployment.spec.bundles * deployment.max_replicas:
            fitting = (i for i, (_, node, _) in enumerate(free) if node.take(bundle, deployment.spec.label_selector))
            taken |= {i for i in [next(fitting, None)] if i is not None}
    counts = Counter({name_of(group): _least(service, group, starts) for group in groups})
    used = Counter(free[i][0] for i in taken)
    for group in groups:
        name, hosts = name_of(group), int(group.spec.get("numOfHosts", 1))
        counts[name] = max(counts[name], -(-used[name] // hosts) * hosts)
    return counts


def _least(service: Service, group: Group, starts: Sequence[str]) -> int:
    if group.is_head:
        return 1
    own = name_of(group) in starts or not service.autoscales
    least = max(group.spec.get("minReplicas") or 0, (group.spec.get("replicas") or 0) if own else 0)
    return int(least) * int(group.spec.get("numOfHosts", 1))


def name_of(group: Group) -> str:
    return "head" if group.is_head else str(group.spec["groupName"])


def gpus(counts: Counts, groups: Sequence[Group]) -> int:
    of_pod = {name_of(group): group.node.resources["GPU"] for group in groups}
    return round(sum(of_pod[name] * count for name, count in counts.items()))


def _steps(service: Service) -> Iterator[tuple[int, int]]:
    """Yield the percentages of replicas of the old and the new cluster, one after the other."""
    options = (service.spec.get("upgradeStrategy") or {}).get("clusterUpgradeOptions") or {}
    surge = int(options.get("maxSurgePercent", 100)) or 100
    old, new = 100, 0
    while old or new < 100:
        old, new = (max(0, old - surge), new) if old + new > 100 else (old, min(100, new + surge))
        yield old, new


def _scaled(service: Service, percent: int) -> Counts:
    """Return the pods of a cluster with this target_capacity, as Serve rounds it."""

    def scaled(count: int) -> int:
        exact = Decimal(count * percent) / 100
        return max(1, int(exact.to_integral_value(ROUND_HALF_UP))) if percent and count else 0

    deployments = [replace(each, max_replicas=scaled(each.max_replicas)) for each in replicas_of(service)]
    return needed(service, service.groups, deployments)
