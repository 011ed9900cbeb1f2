"""The metrics of speculative decoding, under vLLM's names."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily as Counter

from deployments.observability.engine_metrics import PartMetrics, Row
from engine.wire.parts.speculation import SpecDecodeStats

ROWS: list[Row] = [
    (Counter, "vllm:spec_decode_num_drafts", "Drafts that were verified.", "num_drafts"),
    (Counter, "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.", "num_draft_tokens"),
    (
        Counter,
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        "num_accepted_tokens",
    ),
    (
        Counter,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were accepted, by their position in a draft.",
        "num_accepted_tokens_per_pos",
        "position",
    ),
]
METRICS = (PartMetrics(SpecDecodeStats, ROWS, of_answers=True),)
