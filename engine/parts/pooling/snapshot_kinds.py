"""What a snapshot of a scheduler has of pooling."""

from __future__ import annotations

from engine.parts.pooling.pooling import Pooling
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.parts.pooling import PoolingParams, SupportedTasks

KINDS = SnapshotKinds(objects=(Pooling,), messages=(PoolingParams, SupportedTasks))
