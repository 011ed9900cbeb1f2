"""What routers count, for /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from deployments.ingress_stats import ModelStats

TOKENS = {
    "manta_routing_estimated_cached_tokens": ("Prompt tokens that the router took to be cached.", "estimated_tokens"),
    "manta_routing_cached_tokens": ("Those that were, of the same sequences.", "cached_tokens"),
    "manta_routing_drift_tokens": ("How far the two were apart, added up over sequences.", "drift_tokens"),
}


def routing_metrics(models: Iterable[tuple[list[str], ModelStats]], label_names: list[str]) -> Iterator[Metric]:
    """models: label values, and what was counted. The sequences are those of ingresses; where their prompts were
    computed is not counted here."""
    routed = CounterMetricFamily(
        "manta_routed_requests",
        "Sequences sent to an engine, and why there.",
        labels=[*label_names, "policy", "reason"],
    )
    tokens = {field: CounterMetricFamily(name, text, labels=label_names) for name, (text, field) in TOKENS.items()}
    for labels, stats in models:
        for reason, count in stats.routing.routed.items():
            routed.add_metric([*labels, stats.routing.policy, reason], count)
        for field, counter in tokens.items():
            counter.add_metric(labels, getattr(stats.routing, field))
    yield routed
    yield from tokens.values()
