"""What an engine tells of itself, for tests that mind a few figures of it."""

from __future__ import annotations

from typing import Any

from engine.wire.stats.engine_stats import EngineStats


def engine_stats(**figures: Any) -> EngineStats:
    """The stats of an engine of ten blocks that has done nothing yet, but for `figures`."""
    nothing: dict[str, Any] = {
        "running": 0,
        "waiting": 0,
        "blocks_total": 10,
        "blocks_free": 10,
        "blocks_cached": 0,
        "blocks_used": 0,
        "block_size": 16,
        "steps": 0,
        "prompt_tokens": 0,
        "generation_tokens": 0,
        "preemptions": 0,
        "prefix_queried_tokens": 0,
        "prefix_hit_tokens": 0,
        "finished": {},
    }
    return EngineStats(**nothing | figures)
