"""What routers count, for /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from deployments.routing.stats import RoutingStats

TOKENS = {
    "manta_routing_estimated_cached_tokens": ("Prompt tokens that the router took to be cached.", "estimated_tokens"),
    "manta_routing_cached_tokens": ("Those that were, of the same calls.", "cached_tokens"),
    "manta_routing_drift_tokens": ("How far the two were apart, added up over calls.", "drift_tokens"),
}


def routing_metrics(routers: Iterable[tuple[Mapping[str, str], RoutingStats]]) -> Iterator[Metric]:
    """routers: labels of each, and what it counted. The labels differ: some are in ingresses, others in replicas."""
    routed = CounterMetricFamily(
        "manta_routed_requests", "Sequences and prefill requests by why they went to their engine."
    )
    tokens = {field: CounterMetricFamily(name, text) for name, (text, field) in TOKENS.items()}
    for labels, stats in routers:
        for reason, count in stats.routed.items():
            routed.add_sample(f"{routed.name}_total", {**labels, "policy": stats.policy, "reason": reason}, count)
        for field, counter in tokens.items():
            counter.add_sample(f"{counter.name}_total", dict(labels), getattr(stats, field))
    yield routed
    yield from tokens.values()
