"""Images in prompts."""

from __future__ import annotations

from typing import ClassVar

from engine.wire.parts.part_record import PartRecord


class ImageStats(PartRecord, frozen=True):
    """Totals of one engine since its start."""

    part: ClassVar[str] = "images"

    encoded: int
    """Images that the vision encoder has computed."""
    cache_hits: int
    """Times that a step found the embeddings of an image in the cache."""
