"""How the ranks of an engine join, by its options."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig


def group_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of TPGroup's `listen` and `connect` for the ranks of an engine, besides the key."""
    return {
        "device": config.device,
        "shared_memory": not config.disable_custom_all_reduce,
        "collectives": config.pipeline_parallel_size == 1,
    }
