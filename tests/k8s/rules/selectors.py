"""Label selectors, and the labels of the pods that they are held against."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.cli.lint.manifests import Group, Manifest


def selects(selector: Manifest | None, labels: Mapping[str, str]) -> bool:
    """Evaluate a label selector; an empty one selects everything."""
    wanted = (selector or {}).get("matchLabels") or {}
    for expression in (selector or {}).get("matchExpressions") or []:
        value, values, operator = labels.get(expression["key"]), expression.get("values") or [], expression["operator"]
        holds = value is not None if operator in ("Exists", "DoesNotExist") else value in values
        if holds == (operator in ("NotIn", "DoesNotExist")):
            return False
    return wanted.items() <= labels.items()


def pod_labels(group: Group) -> Mapping[str, str]:
    """Return the labels of its pods, with those that the operator adds."""
    own = (group.spec["template"].get("metadata") or {}).get("labels") or {}
    return {"ray.io/is-ray-node": "yes", "ray.io/node-type": "head" if group.is_head else "worker", **own}
