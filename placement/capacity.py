"""Checks whether the cluster could ever hold a replica. Ray itself would wait silently, for ever, for a node that is
large enough."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from placement.spec import GroupSpec

EPSILON = 1e-6
NODE_GROUP = "ray.io/node-group"  # label of nodes started by an autoscaler or KubeRay
OWN_RESOURCES = ("node:", "memory", "object_store_memory")  # resources that every node has


@dataclass(frozen=True, slots=True)
class Node:
    resources: Mapping[str, float]  #: total resources, including those in use
    labels: Mapping[str, str]


def cluster_nodes() -> list[Node]:
    return [Node(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]


def can_grow(nodes: Sequence[Node]) -> bool:
    """Return whether nodes can still be added: by an autoscaler, or by KubeRay, which starts pods one after the
    other."""
    return any(node.labels.get(NODE_GROUP) for node in nodes)


def missing(spec: GroupSpec, nodes: Sequence[Node]) -> str | None:
    """Return why `nodes` could not hold one replica even if nothing else ran there; None if they could."""
    usable = [node for node in nodes if matches(node.labels, spec.label_selector)]
    found = _ranks_that_fit(spec, usable)
    if found >= spec.num_ranks:
        return None
    if not usable:
        selector = ", ".join(f"{key}: {value}" for key, value in spec.label_selector.items())
        problem = f"no node has the labels {{{selector}}}"
    elif found == 0:
        problem = _describe_shortage(spec, usable)
    else:
        where = {"STRICT_PACK": "on one node", "STRICT_SPREAD": "on separate nodes"}.get(spec.strategy, "anywhere")
        problem = f"only {found} of them fit{'s' if found == 1 else ''} {where}"
    ranks = "1 rank" if spec.num_ranks == 1 else f"{spec.num_ranks} ranks, each"
    required = (
        f"a replica needs {ranks} with {_describe(spec.rank_bundle)}, and {spec.control_cpus:g} CPU more for the first"
    )
    labels = spec.label_selector.keys()
    kinds = Counter(
        _describe(node.resources, {k: node.labels[k] for k in labels if k in node.labels}) for node in nodes
    )
    has = "; ".join(f"{count} node{'s' if count > 1 else ''} with {kind}" for kind, count in kinds.items())
    return f"{required} ({spec.strategy}), but {problem}. The cluster has {has or 'no node'}"


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether labels match a label selector of Ray, whose values are `v`, `!v`, `in(v, w)` or `!in(v, w)`."""
    for key, wanted in selector.items():
        negated = wanted.startswith("!")
        listed = re.fullmatch(r"in\((.*)\)", wanted.removeprefix("!"))
        values = [v.strip() for v in listed[1].split(",")] if listed else [wanted.removeprefix("!")]
        if (labels.get(key) in values) == negated:
            return False
    return True


def _ranks_that_fit(spec: GroupSpec, nodes: Sequence[Node]) -> int:
    first, rank = spec.bundles[0], spec.rank_bundle
    limit = 1 if spec.strategy == "STRICT_SPREAD" else spec.num_ranks
    best = 0
    for number, home in enumerate(nodes):
        if not _capacity(home.resources, first):
            continue
        rest = {resource: amount - first.get(resource, 0.0) for resource, amount in home.resources.items()}
        here = min(limit, 1 + _capacity(rest, rank))
        if spec.strategy == "STRICT_PACK":
            best = max(best, here)
        else:
            elsewhere = [*nodes[:number], *nodes[number + 1 :]]
            others = sum(min(limit, _capacity(node.resources, rank)) for node in elsewhere)
            best = max(best, here + others)
    return best


def _capacity(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many times the bundle fits these resources."""
    return min(int((resources.get(resource, 0.0) + EPSILON) / amount) for resource, amount in bundle.items())


def _describe_shortage(spec: GroupSpec, nodes: Sequence[Node]) -> str:
    """Return the resource of the first bundle that no node has enough of."""
    for resource, amount in spec.bundles[0].items():
        largest = max(node.resources.get(resource, 0.0) for node in nodes)
        if largest + EPSILON < amount:
            return f"no node has {_describe({resource: amount})}" + (f", at most {largest:g}" if largest else "")
    return "no node has all of it together"


def _describe(resources: Mapping[str, float], labels: Mapping[str, str] | None = None) -> str:
    parts = []
    for resource, amount in sorted(resources.items()):
        if resource.startswith("accelerator_type:"):
            parts.append(resource.replace("accelerator_type:", "type "))
        elif not resource.startswith(OWN_RESOURCES):
            parts.append(f"{amount:g} {resource}")
    parts += [f"{key}={value}" for key, value in (labels or {}).items()]
    return " + ".join(parts) or "nothing"
