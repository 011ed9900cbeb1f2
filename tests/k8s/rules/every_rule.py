"""What our own manifests are held to: the rules of `manta k8s lint`, and those of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cli.lint import rules
from cluster.cli.lint.manifests import Manifest
from cluster.cli.lint.violation import Violation
from tests.k8s.rules import network, pods

RULES: tuple[rules.Rule, ...] = (
    *rules.RULES,
    network.open_ports,
    network.cut_off,
    network.monitors,
    pods.refused,
    pods.head,
    pods.redis,
    pods.memory,
    pods.gpu_kind,
    pods.claims,
    pods.budgets,
)


def violations(manifests: Sequence[Manifest]) -> list[Violation]:
    return rules.violations(manifests, RULES)
