"""Rules about what KubeRay's operator changes in a RayService.

When the operator adds its finalizer, it updates the whole object, in the form of its Go types. It then owns each field
that this has changed, and worker groups are one field. From then on, `kubectl apply --server-side` and `helm upgrade`
fail with a conflict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from cluster.cli.lint.manifests import Service
from cluster.cli.lint.violation import Violation

KUBERAY, KUBERNETES_API = "1.7.0", "0.36.0"  # versions of the Go types: of KubeRay, and of k8s.io/api in its go.mod
RESOURCE_FIELD = "valueFrom.resourceFieldRef.divisor"
CLAIM = "template.spec.volumes.*.ephemeral.volumeClaimTemplate"
# What the types write where a worker group has nothing: fields that are structs, not pointers to structs, so that
# `omitempty` has no effect. `*` stands for each item of a list.
WRITTEN = {
    "scaleStrategy": "{}",
    "template.metadata": "{}",
    "template.spec.initContainers.*.resources": "{}",
    "template.spec.containers.*.resources": "{}",
    f"template.spec.initContainers.*.env.*.{RESOURCE_FIELD}": '"0"',
    f"template.spec.containers.*.env.*.{RESOURCE_FIELD}": '"0"',
    "template.spec.volumes.*.downwardAPI.items.*.resourceFieldRef.divisor": '"0"',
    "template.spec.volumes.*.projected.sources.*.downwardAPI.items.*.resourceFieldRef.divisor": '"0"',
    f"{CLAIM}.metadata": "{}",
    f"{CLAIM}.spec.resources": "{}",
}
# What they leave out, because of `omitempty`: empty lists and texts, and of these fields empty mappings and `false`.
# Texts in the first mappings stay.
STRING_MAPS = ("annotations", "labels", "matchLabels", "nodeSelector", "rayStartParams")
EMPTY_MAPS = (*(name for name in STRING_MAPS if name != "rayStartParams"), "limits", "requests")
FALSE = ("hostIPC", "hostNetwork", "hostPID", "readOnly", "stdin", "stdinOnce", "tty")
POINTERS = ("storageClassName",)  # whose empty text stays
QUANTITIES, QUANTITY_MAPS = ("divisor", "sizeLimit"), ("limits", "requests")
DECIMAL, BINARY = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
KUBERAYS, ELSE = f"as KubeRay {KUBERAY}", "else the next apply conflicts with the operator"


def next_apply(service: Service) -> Iterator[Violation]:
    """Check that the operator changes nothing that an apply sets."""
    for group in service.groups[1:]:
        for field, written in WRITTEN.items():
            for path in _missing(group.spec, field.split(".")):
                yield Violation(
                    "apply-conflict", group.where, f"{path} must be {written}, {KUBERAYS} writes it; {ELSE}"
                )
        for path, value in _left_out(group.spec):
            message = f"{path} must be left out, {KUBERAYS} does; {ELSE}, got {value!r}"
            yield Violation("apply-conflict", group.where, message)
    for path, quantity in _quantities(service.cluster):
        if quantity != (written := canonical(quantity)):
            message = f'{path} must be "{written}", {KUBERAYS} writes it; {ELSE}, got {quantity!r}'
            yield Violation("apply-conflict", service.name, message)


def canonical(quantity: Any) -> str:
    """Return a quantity in the form in which Kubernetes writes it: 1Gi for 1024Mi, 500m for 0.5. One that has an
    exponent, or is not a quantity, is returned as it is."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-zA-Z]*)", str(quantity))
    if found is None or found[2] not in DECIMAL + BINARY:
        return str(quantity)
    suffixes, base = (BINARY, 1024) if found[2] in BINARY[1:] else (DECIMAL, 1000)
    value = Fraction(found[1]) * Fraction(base) ** (suffixes.index(found[2]) - suffixes.index(""))
    if base == 1024 and (value < base or value.denominator > 1):
        suffixes, base = DECIMAL, 1000
    power = suffixes.index("")
    while value.denominator > 1 and power > 0:
        value, power = value * base, power - 1
    while value and value % base == 0 and power < len(suffixes) - 1:
        value, power = value / base, power + 1
    return f"{value}{suffixes[power]}"


def is_left_out(key: str | int, value: Any) -> bool:
    """Return whether the types leave out a field with this value."""
    return (
        (value in ([], "") and key not in POINTERS)
        or (value == {} and key in EMPTY_MAPS)
        or (value is False and key in FALSE)
    )


def _missing(place: Any, steps: Sequence[str], above: str = "") -> Iterator[str]:
    """Yield the path of each place where the last step is missing, but all before it are there."""
    step, *rest = steps
    if step == "*":
        for i, item in enumerate(place or []):
            yield from _missing(item, rest, f"{above}.{i}")
        return
    path = f"{above}.{step}".lstrip(".")
    if not rest:
        if place.get(step) is None:
            yield path
    elif place.get(step) is not None:
        yield from _missing(place[step], rest, path)


def _left_out(place: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field that the types leave out."""
    for key, value in place.items() if isinstance(place, dict) else enumerate(place):
        path = f"{above}.{key}".lstrip(".")
        if is_left_out(key, value):
            yield path, value
        elif isinstance(value, dict | list) and key not in STRING_MAPS:
            yield from _left_out(value, path)


def _quantities(place: Any, path: str = "rayClusterConfig") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each quantity below a place."""
    for key, value in place.items() if isinstance(place, dict) else enumerate(place):
        here = f"{path}.{key}"
        if key in QUANTITY_MAPS and isinstance(value, dict):
            yield from ((f"{here}.{name}", quantity) for name, quantity in value.items())
        elif key in QUANTITIES:
            yield here, value
        elif isinstance(value, dict | list):
            yield from _quantities(value, here)
