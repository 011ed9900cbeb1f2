"""Options of files and batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    folder: str | None = None
    """Folder for the contents of files and batches, shared by all ingresses; None turns both APIs off."""
    max_in_flight: int = 16
    """Requests of one batch that run at a time while no other request has to wait."""
