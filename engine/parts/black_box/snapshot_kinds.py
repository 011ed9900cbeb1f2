"""What a snapshot of a scheduler has of the black box."""

from __future__ import annotations

from engine.parts.black_box.noted_requests import NotedRequests
from engine.parts.snapshot_kinds import SnapshotKinds

KINDS = SnapshotKinds(objects=(NotedRequests,))
