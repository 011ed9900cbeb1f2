"""Options of files and batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    folder: str | None = None
    """Where contents of files and batches are kept; all ingresses share it. None: there are none."""
    max_in_flight: int = 16
    """Requests of one batch that run at a time while no request has to wait."""
