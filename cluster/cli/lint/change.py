"""What KubeRay's operator does when a RayService changes (1.7: rayservice_controller.go, isClusterSpecHashEqual).

It compares digests of rayClusterConfig. If they differ, it starts a second RayCluster, unless worker groups are only
appended: then it changes the RayCluster in place. What is not in the digest reaches a RayCluster only together with an
appended group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.cli.lint.kuberay import QUANTITIES, QUANTITY_MAPS, canonical, is_left_out
from cluster.cli.lint.manifests import Manifest, Service

OF_POD = ("template.spec.tolerations", "template.spec.schedulingGates")
OF_GROUP = ("replicas", "minReplicas", "maxReplicas", "scaleStrategy.workersToDelete", *OF_POD)
OF_CLUSTER = ("upgradeStrategy", "suspend", *(f"headGroupSpec.{path}" for path in OF_POD))

Way = Literal["nothing", "in place", "second cluster", "in steps", "refused"]
WAYS: dict[str, Way] = {"NewCluster": "second cluster", "NewClusterWithIncrementalUpgrade": "in steps"}


@dataclass(frozen=True, slots=True)
class Change:
    way: Way
    """What happens to the RayCluster."""
    appended: list[str] = field(default_factory=list)
    """Names of worker groups that are appended."""
    reasons: list[str] = field(default_factory=list)
    """Fields that cannot change in place."""
    unapplied: list[str] = field(default_factory=list)
    """Fields of which the running RayCluster learns nothing."""
    reconfigured: bool = False
    """Whether Serve gets another configuration."""


def change_of(old: Service, new: Service) -> Change:
    reconfigured, before, after = old.serve != new.serve, _plain(old.cluster), _plain(new.cluster)
    groups, known = ([group["groupName"] for group in each.get("workerGroupSpecs") or []] for each in (after, before))
    appended = groups[len(known) :]
    unseen = sorted(
        {*_unseen(before, after, OF_CLUSTER)}
        | {
            f"workerGroupSpecs.{name}.{path}"
            for name, was, now in zip(known, *_lists(before, after), strict=False)
            for path in _unseen(was, now, OF_GROUP)
        }
    )
    first = {**after, "workerGroupSpecs": (after.get("workerGroupSpecs") or [])[: len(known)]}
    reasons = list(_differences(_seen(before), _seen(first)))
    if reasons:
        strategy = (new.spec.get("upgradeStrategy") or {}).get("type", "NewCluster")
        return Change(WAYS.get(strategy, "refused"), [], reasons, reconfigured=reconfigured)
    if appended:
        return Change("in place", appended, reconfigured=reconfigured)
    return Change("nothing", unapplied=unseen, reconfigured=reconfigured)


def _lists(*clusters: Manifest) -> Iterator[list[Manifest]]:
    for cluster in clusters:
        yield cluster.get("workerGroupSpecs") or []


def _plain(place: Any, key: str = "") -> Any:
    """Return a part of a manifest as KubeRay's types hold it, in which there are several ways to write the same."""
    if isinstance(place, dict):
        amounts = key in QUANTITY_MAPS
        plain = {name: canonical(each) if amounts else _plain(each, name) for name, each in place.items()}
        return {name: each for name, each in plain.items() if each not in (None, {}) and not is_left_out(name, each)}
    if isinstance(place, list):
        return [_plain(each) for each in place]
    return canonical(place) if key in QUANTITIES else place


def _seen(cluster: Manifest) -> Manifest:
    """Return what is in the digest."""
    groups = [_without(group, OF_GROUP) for group in cluster.get("workerGroupSpecs") or []]
    return {**_without(cluster, OF_CLUSTER), "workerGroupSpecs": groups}


def _without(place: Manifest, paths: tuple[str, ...]) -> Manifest:
    kept = dict(place)
    for path in paths:
        step, _, rest = path.partition(".")
        if step in kept and rest:
            kept[step] = _without(kept[step], (rest,))
        else:
            kept.pop(step, None)
    return kept


def _unseen(was: Manifest, now: Manifest, paths: tuple[str, ...]) -> Iterator[str]:
    yield from (path for path in paths if _at(was, path) != _at(now, path))


def _at(place: Any, path: str) -> Any:
    for step in path.split("."):
        place = (place or {}).get(step)
    return place


def _differences(was: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield each field that differs, with both values. Worker groups, containers and so on have their names."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from _differences(was.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(was, list) and isinstance(now, list):
        names, others = [_name(item) for item in was], [_name(item) for item in now]
        if names != others and None not in names + others:
            yield f"{path}: {', '.join(map(str, names)) or 'none'} -> {', '.join(map(str, others)) or 'none'}"
        elif len(was) != len(now):
            yield f"{path}: {len(was)} -> {len(now)} items"
        else:
            for i, (one, other) in enumerate(zip(was, now, strict=True)):
                yield from _differences(one, other, f"{path}.{names[i] or i}")
    elif was != now:
        yield f"{path}: {_told(was)} -> {_told(now)}"


def _name(item: Any) -> str | None:
    """Return by what an item of a list is known; None if it has no name."""
    return item.get("groupName", item.get("name")) if isinstance(item, dict) else None


def _told(value: Any) -> str:
    return "none" if value is None else "..." if isinstance(value, dict | list) else str(value)
