"""What a snapshot of a scheduler has of pipeline stages."""

from __future__ import annotations

from engine.parts.snapshot_kinds import SnapshotKinds
from engine.parts.stages.micro_batches import MicroBatches

KINDS = SnapshotKinds(
    objects=(MicroBatches,),
)
