"""Prometheus series of what engines report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from engine.wire.histogram import Histogram
from engine.wire.messages import EngineStatus

LABELS = ["model_name", "engine"]
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens computed or found in the cache.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated.", "generation_tokens"),
    "vllm:num_preemptions": ("Requests that lost their KV blocks to others.", "preemptions"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
}
GAUGES = {
    "vllm:num_requests_running": ("Requests that hold KV blocks.", "running"),
    "vllm:num_requests_waiting": ("Requests in the engine's queue.", "waiting"),
}
HISTOGRAMS = {
    "inter_token_latency_seconds": "From one token of a request to the next.",
    "request_time_per_output_token_seconds": "Mean over a request's tokens after the first.",
    "request_queue_time_seconds": "From arrival in the engine to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_params_max_tokens": "Tokens that a request may generate.",
    "request_num_preemptions": "How often a request lost its KV blocks.",
}
HANDOFF_COUNTERS = {
    "manta_handoff_bytes_overlapped": ("Bytes of KV read while prefill still computed.", "bytes_overlapped"),
    "manta_handoff_lease_expiries": ("Handoffs whose decode engine fell silent.", "lease_expiries"),
    "manta_handoff_stale_messages": ("Messages of handoffs or engines that are no more.", "stale_messages"),
    "manta_handoff_malformed_messages": ("Messages that were not understood.", "malformed_messages"),
}

Engines = Sequence[tuple[list[str], EngineStatus]]
"""Statuses, each with the values of LABELS."""


def family(kind: Any, name: str, text: str, labels: list[str], samples: Iterable[tuple[Any, ...]]) -> Metric:
    """Return a metric of this kind. samples: the values of its labels, and what `add_metric` of the kind takes."""
    metric = kind(name, text, labels=labels)
    for values, *sample in samples:
        metric.add_metric(values, *sample)
    return metric


def buckets(histogram: Histogram) -> tuple[list[tuple[str, int]], float]:
    """Return what HistogramMetricFamily takes: cumulative counts by upper bound, and the sum."""
    found, below = [], 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        below += count
        found.append((floatToGoString(bound), below))
    return found, histogram.sum


def request_metrics(engines: Engines) -> Iterator[Metric]:
    """engines: those that decode only: a request counts once, however many engines work for it."""
    for name, (text, field) in COUNTERS.items():
        yield family(CounterMetricFamily, name, text, LABELS, ((e, getattr(s.stats, field)) for e, s in engines))
    for name, text in HISTOGRAMS.items():
        samples = ((e, *buckets(s.stats.histograms[name])) for e, s in engines)
        yield family(HistogramMetricFamily, f"vllm:{name}", text, LABELS, samples)
    yield family(
        CounterMetricFamily,
        "manta_engine_requests_ended",
        "Requests, as their engine saw their end.",
        [*LABELS, "reason"],
        (([*e, reason], count) for e, s in engines for reason, count in s.stats.finished.items()),
    )


def load_metrics(engines: Engines) -> Iterator[Metric]:
    for name, (text, field) in GAUGES.items():
        yield family(GaugeMetricFamily, name, text, LABELS, ((e, getattr(s.stats, field)) for e, s in engines))
    yield family(
        HistogramMetricFamily,
        "vllm:iteration_tokens_total",
        "Tokens computed in one step.",
        LABELS,
        ((e, *buckets(s.stats.histograms["iteration_tokens_total"])) for e, s in engines),
    )
    yield family(
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Used fraction of the KV blocks, 0 to 1.",
        LABELS,
        ((e, s.stats.blocks_used / s.stats.blocks_total) for e, s in engines),
    )
    yield family(
        GaugeMetricFamily,
        "vllm:cache_config_info",
        "The KV cache.",
        [*LABELS, "block_size", "num_gpu_blocks"],
        (([*e, str(s.stats.block_size), str(s.stats.blocks_total)], 1) for e, s in engines),
    )


def handoff_metrics(engines: Engines) -> Iterator[Metric]:
    """Prompts that one engine computes for another. Engines without handoffs have only blocks and decisions.

    vLLM has no names for these: what it counts of its transfers is NIXL's, and ours has other transports too.
    """
    yield family(
        GaugeMetricFamily,
        "manta_kv_blocks",
        "KV blocks by state.",
        [*LABELS, "state"],
        (([*e, state], count) for e, s in engines for state, count in _blocks(s).items()),
    )
    yield family(
        CounterMetricFamily,
        "pd_decision",
        "Prompts by where they were computed, and why.",
        [*LABELS, "where", "reason"],
        (
            ([*e, where, reason], count)
            for e, s in engines
            for where, reasons in s.stats.prefill_decisions.items()
            for reason, count in reasons.items()
        ),
    )
    found = [(e, s.handoffs) for e, s in engines if s.handoffs is not None]
    if not found:
        return
    yield family(
        CounterMetricFamily,
        "manta_handoffs",
        "Handoffs that ended, as each of their two engines saw it.",
        [*LABELS, "result", "reason"],
        (
            ([*e, result, reason], count)
            for e, stats in found
            for result, reasons in stats.results.items()
            for reason, count in reasons.items()
        ),
    )
    yield family(
        SummaryMetricFamily,
        "manta_handoff_phase_seconds",
        "Parts of a handoff.",
        [*LABELS, "phase"],
        (([*e, phase], *times) for e, stats in found for phase, times in stats.phase_seconds.items()),
    )
    yield family(
        CounterMetricFamily,
        "manta_handoff_bytes",
        "KV read from other engines.",
        [*LABELS, "transport"],
        (([*e, transport], count) for e, stats in found for transport, count in stats.bytes_read.items()),
    )
    totals = [(e, stats.bytes_overlapped, sum(stats.bytes_read.values())) for e, stats in found]
    yield family(
        GaugeMetricFamily,
        "manta_handoff_overlap_ratio",
        "Fraction of bytes read while computing.",
        LABELS,
        ((e, overlapped / total) for e, overlapped, total in totals if total),
    )
    live = ((e, stats.live) for e, stats in found)
    yield family(GaugeMetricFamily, "manta_handoffs_live", "Handoffs under way.", LABELS, live)
    quarantined = ((e, len(stats.quarantined)) for e, stats in found)
    text = "Engines whose link has failed."
    yield family(GaugeMetricFamily, "manta_handoff_resting_peers", text, LABELS, quarantined)
    for name, (text, field) in HANDOFF_COUNTERS.items():
        yield family(CounterMetricFamily, name, text, LABELS, ((e, getattr(stats, field)) for e, stats in found))


def _blocks(status: EngineStatus) -> dict[str, int]:
    """Return KV blocks by state. Their sum is the total: anything else is a leak."""
    stats = status.stats
    return {
        "free": stats.blocks_free,
        "cached": stats.blocks_cached,
        "running": stats.blocks_used - stats.blocks_reserved - stats.blocks_leased,
        "reserved": stats.blocks_reserved,
        "leased": stats.blocks_leased,
    }
