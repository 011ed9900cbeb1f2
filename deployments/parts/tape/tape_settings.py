"""What the configuration says of a model's tapes."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.openai.served.served_model import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeSettings:
    max_mib: int
    """MiB for the newest choices of a router."""
    ttft_s: float
    """Target for the time to the first token; if many requests miss it, tapes are kept."""


def settings_of(info: ModelInfo) -> TapeSettings | None:
    """Return the settings of a model; None if it records no tape."""
    return info.of.get("tape")
