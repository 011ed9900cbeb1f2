"""A violation of `manta k8s lint`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem} ({self.rule})"
