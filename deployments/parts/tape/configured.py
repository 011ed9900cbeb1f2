"""Reads what the configuration says of a model's tapes."""

from __future__ import annotations

from deployments.openai.served.model_source import ModelSource
from deployments.parts.tape.tape_settings import TapeSettings


def read(source: ModelSource) -> TapeSettings | None:
    """Return the settings; None if the engines record no tape."""
    if not source.engine.tape_mib:
        return None
    return TapeSettings(max_mib=source.engine.tape_mib, ttft_s=source.section["slo"]["ttft_ms"] / 1000)
