"""Options of files and batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    folder: str | None = None
    """Where files and batches are kept; all ingresses share it. None: there are none."""
