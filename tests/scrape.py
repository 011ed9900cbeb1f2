"""A scrape of /metrics, read as Prometheus reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    labels: dict[str, str]
    value: float


class NoSeries(AssertionError):
    """What should have been reported is not there."""


class Scrape:
    """series: all of them."""

    def __init__(self, text: str):
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.series = [Series(sample.name, dict(sample.labels), sample.value) for sample in samples]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all series with these labels. Raises NoSeries if there is none."""
        found = [one.value for one in self.series if one.name == name and labels.items() <= one.labels.items()]
        if not found:
            raise NoSeries(f"no series {name} with {labels}")
        return sum(found)

    def select(self, name: str, matchers: list[tuple[str, str, str]]) -> list[Series]:
        """What a PromQL selector finds. matchers: (label, one of = != =~ !~, value)."""
        return [one for one in self.series if one.name == name and all(_matches(one, *each) for each in matchers)]


def _matches(one: Series, label: str, op: str, value: str) -> bool:
    actual = one.labels.get(label, "")
    equal = re.fullmatch(value, actual) is not None if "~" in op else actual == value
    return equal != op.startswith("!")
