"""Prometheus series defined by tables, and the tables for the reports of engines. Parts have their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.core import SummaryMetricFamily as Summary
from prometheus_client.utils import floatToGoString

from engine.wire.messages import EngineStatus
from engine.wire.part_record import PartRecord
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.stats.handoff_stats import HandoffStats
from engine.wire.stats.histogram import Histogram

LABELS = ["model_name", "engine"]

Engines = Sequence[tuple[list[str], EngineStatus]]
"""Statuses of engines, each with its values of LABELS."""


Row = tuple[Any, str, str, str | Callable[[Any], Any], *tuple[str, ...]]
"""A metric in a table: its kind, name and help text, how to read it from a report, and further labels.

A path of fields or a function returns a number, a Histogram, or (count, sum) of a Summary; None for no sample. With
further labels it returns nested dicts of these, one level per label, keyed by the label's values, or lists, whose
indices are the values. The fields after one that is None need not exist.
"""


def histograms(texts: Mapping[str, str]) -> list[Row]:
    """Return rows of histograms under vLLM's names. texts: help text by name in the report's `histograms`."""
    return [
        (HistogramMetricFamily, f"vllm:{name}", text, lambda report, name=name: report.histograms[name])
        for name, text in texts.items()
    ]


def collect(table: Iterable[Row], labels: list[str], reports: Sequence[tuple[list[str], Any]]) -> Iterator[Metric]:
    """Yield the metrics of a table. reports: objects that the table reads, each with its values of `labels`."""
    for kind, name, text, read, *own in table:
        metric = kind(name, text, labels=[*labels, *own])
        for values, report in reports:
            value = _at(report, read) if isinstance(read, str) else read(report)
            for more, sample in _samples(value, len(own)):
                metric.add_metric([*values, *more], *sample)
        yield metric


def _at(report: Any, path: str) -> Any:
    for field in path.split("."):
        report = None if report is None else getattr(report, field)
    return report


def _samples(value: Any, num_labels: int) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
    """Yield label values, with the arguments that `add_metric` takes for them."""
    if value is None:
        return
    if num_labels:
        for label, inner in enumerate(value) if isinstance(value, list) else value.items():
            for labels, sample in _samples(inner, num_labels - 1):
                yield [str(label), *labels], sample
    elif isinstance(value, Histogram):
        yield [], (_buckets(value), value.sum)
    else:
        yield [], value if isinstance(value, tuple) else (value,)


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Return cumulative counts, by upper bound."""
    found, below = [], 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        below += count
        found.append((floatToGoString(bound), below))
    return found


def _blocks(stats: EngineStats) -> dict[str, int]:
    """Return KV blocks by state. Their sum must be the total; anything else is a leak."""
    return {
        "free": stats.blocks_free,
        "cached": stats.blocks_cached,
        "running": stats.blocks_used - stats.blocks_reserved - stats.blocks_leased,
        "reserved": stats.blocks_reserved,
        "leased": stats.blocks_leased,
    }


def _roles(status: EngineStatus) -> dict[str, int]:
    return {role: role == status.role for role in ("decode", "prefill")} if status.role else {}


def _cache_config(stats: EngineStats) -> dict[int, dict[int, int]]:
    return {stats.block_size: {stats.blocks_total: 1}}


def _overlap(stats: HandoffStats) -> float | None:
    total = sum(stats.bytes_read.values())
    return stats.bytes_overlapped / total if total else None


# of EngineStats
REQUESTS: list[Row] = [
    (Counter, "vllm:prompt_tokens", "Prompt tokens computed or found in the cache.", "prompt_tokens"),
    (Counter, "vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    (Counter, "vllm:num_preemptions", "Requests that lost their KV blocks to other requests.", "preemptions"),
    (Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    (Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    *histograms(
        {
            "inter_token_latency_seconds": "Time from one token of a request to the next.",
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
    ),
    (
        Counter,
        "manta_engine_requests_ended",
        "Requests that ended, by the reason in their engine.",
        "finished",
        "reason",
    ),
]
LOAD: list[Row] = [
    (Gauge, "vllm:num_requests_running", "Requests that hold KV blocks.", "running"),
    (Gauge, "vllm:num_requests_waiting", "Requests in the engine's queue.", "waiting"),
    *histograms({"iteration_tokens_total": "Tokens computed in one step."}),
    (Gauge, "vllm:kv_cache_usage_perc", "Used fraction of the KV blocks, 0 to 1.", "kv_usage"),
    (Gauge, "vllm:cache_config_info", "The KV cache.", _cache_config, "block_size", "num_gpu_blocks"),
]
LABELLED: list[Row] = [
    (Gauge, "manta_kv_blocks", "KV blocks by state.", _blocks, "state"),
    (
        Gauge,
        "manta_kv_group_blocks",
        "KV blocks by KV cache group, if there are several.",
        "group_blocks",
        "group",
        "state",
    ),
    (Gauge, "manta_kv_group_block_bytes", "Bytes of one block of a group on a rank.", "group_block_bytes", "group"),
]
# of HandoffStats. vLLM has no names for these: its transfer metrics are NIXL's, and we have other transports too
HANDOFFS: list[Row] = [
    (
        Counter,
        "manta_handoffs",
        "Handoffs that ended, as each of their two engines saw it.",
        "results",
        "result",
        "reason",
    ),
    (Summary, "manta_handoff_phase_seconds", "Seconds in each phase of a handoff.", "phase_seconds", "phase"),
    (Counter, "manta_handoff_bytes", "KV read from other engines.", "bytes_read", "transport"),
    (Gauge, "manta_handoff_overlap_ratio", "Fraction of bytes read while computing.", _overlap),
    (Gauge, "manta_handoffs_live", "Handoffs under way.", "live"),
    (Gauge, "manta_handoff_resting_peers", "Engines whose link has failed.", lambda stats: len(stats.quarantined)),
    (
        Counter,
        "manta_handoff_bytes_overlapped",
        "Bytes of KV read before prefill had computed the prompt.",
        "bytes_overlapped",
    ),
    (
        Counter,
        "manta_handoff_lease_expiries",
        "Handoffs that ended because the decode engine fell silent.",
        "lease_expiries",
    ),
    (Counter, "manta_handoff_stale_messages", "Dropped messages of ended handoffs or engines.", "stale_messages"),
]
# of EngineStatus
STATUS: list[Row] = [
    (
        Counter,
        "manta_engine_refused_messages",
        "Messages that sockets of replicas refused.",
        "refused",
        "socket",
        "reason",
    ),
    (Gauge, "manta_engine_role", "1 for the role of an engine whose role may change, 0 for the other.", _roles, "role"),
    (Counter, "manta_role_changes", "Changes of an engine's role.", lambda s: s.role_changes if s.role else None),
]


class PartMetrics(NamedTuple):
    """The metrics of what a part of engines reports."""

    kind: type[PartRecord]
    """What the table reads."""
    table: list[Row]
    of_answers: bool = False
    """Whether only decode engines count, so that a request counts once."""
    absent: PartRecord | None = None
    """What an engine without the part reports; None for no series."""


def part_metrics(parts: Iterable[PartMetrics], answering: Engines, engines: Engines) -> Iterator[Metric]:
    """Yield the metrics of parts. answering: decode engines."""
    for kind, table, of_answers, absent in parts:
        counted = answering if of_answers else engines
        told = [(labels, status.stats.record(kind) or absent) for labels, status in counted]
        yield from collect(table, LABELS, [(labels, record) for labels, record in told if record is not None])


def request_metrics(engines: Engines) -> Iterator[Metric]:
    """Return the metrics of requests. engines: decode engines only, so that a request counts once."""
    return collect(REQUESTS, LABELS, [(labels, status.stats) for labels, status in engines])


def load_metrics(engines: Engines) -> Iterator[Metric]:
    return collect(LOAD, LABELS, [(labels, status.stats) for labels, status in engines])


def handoff_metrics(engines: Engines, encode: Engines = ()) -> Iterator[Metric]:
    """Yield the metrics of prompts and images that engines compute for each other. Engines without handoffs have only
    blocks and decisions. encode: engines of encode pools."""
    yield from collect(LABELLED, LABELS, [(labels, status.stats) for labels, status in [*engines, *encode]])
    found = [([*labels, "prefill"], status.handoffs) for labels, status in engines]
    found += [([*labels, "encode"], status.image_handoffs) for labels, status in engines]
    found += [([*labels, "encode"], status.handoffs) for labels, status in encode]
    if handoffs := [(labels, stats) for labels, stats in found if stats is not None]:
        yield from collect(HANDOFFS, [*LABELS, "pool"], handoffs)
