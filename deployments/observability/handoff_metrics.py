"""Prometheus series of prompts that one engine computes for another. vLLM has no names for them: what it counts of
its transfers is NIXL's, and ours has other transports too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from engine.wire.messages import EngineStatus

LABELS = ["model_name", "engine"]
COUNTERS = {
    "manta_handoff_bytes_overlapped": ("Bytes of KV read while prefill still computed.", "bytes_overlapped"),
    "manta_handoff_lease_expiries": ("Handoffs whose decode engine fell silent.", "lease_expiries"),
    "manta_handoff_stale_messages": ("Messages of handoffs or engines that are no more.", "stale_messages"),
    "manta_handoff_malformed_messages": ("Messages that were not understood.", "malformed_messages"),
}


def handoff_metrics(engines: Sequence[tuple[list[str], EngineStatus]]) -> Iterator[Metric]:
    """engines: with the values of LABELS. Those without `handoff` have no series, only their blocks and decisions."""
    yield _blocks(engines)
    yield _decisions(engines)
    handing = [(labels, status.handoffs) for labels, status in engines if status.handoffs is not None]
    if not handing:
        return
    text = "Handoffs that ended, as each of their two engines saw it."
    results = CounterMetricFamily("manta_handoffs", text, labels=[*LABELS, "result", "reason"])
    phases = SummaryMetricFamily("manta_handoff_phase_seconds", "Parts of a handoff.", labels=[*LABELS, "phase"])
    read = CounterMetricFamily("manta_handoff_bytes", "KV read from other engines.", labels=[*LABELS, "transport"])
    overlap = GaugeMetricFamily("manta_handoff_overlap_ratio", "Share of bytes read while computing.", labels=LABELS)
    live = GaugeMetricFamily("manta_handoffs_live", "Handoffs under way.", labels=LABELS)
    quarantined = GaugeMetricFamily("manta_handoff_resting_peers", "Engines whose link has failed.", labels=LABELS)
    for labels, stats in handing:
        for result, reasons in stats.results.items():
            for reason, count in reasons.items():
                results.add_metric([*labels, result, reason], count)
        for phase, (count, seconds) in stats.phase_seconds.items():
            phases.add_metric([*labels, phase], count, seconds)
        for transport, num_bytes in stats.bytes_read.items():
            read.add_metric([*labels, transport], num_bytes)
        if total := sum(stats.bytes_read.values()):
            overlap.add_metric(labels, stats.bytes_overlapped / total)
        live.add_metric(labels, stats.live)
        quarantined.add_metric(labels, len(stats.quarantined))
    yield from (results, phases, read, overlap, live, quarantined)
    for name, (text, field) in COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=LABELS)
        for labels, stats in handing:
            counter.add_metric(labels, getattr(stats, field))
        yield counter


def _blocks(engines: Sequence[tuple[list[str], EngineStatus]]) -> Metric:
    """Their sum is `total`: anything else is a leak."""
    blocks = GaugeMetricFamily("manta_kv_blocks", "KV blocks by state.", labels=[*LABELS, "state"])
    for labels, stats in ((labels, status.stats) for labels, status in engines):
        running = stats.blocks_used - stats.blocks_reserved - stats.blocks_leased
        counts = {
            "free": stats.blocks_free,
            "cached": stats.blocks_cached,
            "running": running,
            "reserved": stats.blocks_reserved,
            "leased": stats.blocks_leased,
        }
        for state, count in counts.items():
            blocks.add_metric([*labels, state], count)
    return blocks


def _decisions(engines: Sequence[tuple[list[str], EngineStatus]]) -> Metric:
    decisions = CounterMetricFamily(
        "pd_decision", "Prompts by where they were computed, and why.", labels=[*LABELS, "where", "reason"]
    )
    for labels, status in engines:
        for where, reasons in status.stats.prefill_decisions.items():
            for reason, count in reasons.items():
                decisions.add_metric([*labels, where, reason], count)
    return decisions
