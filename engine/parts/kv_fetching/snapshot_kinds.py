"""What a snapshot of a scheduler has of KV from other caches."""

from __future__ import annotations

from engine.parts.kv_fetching.kv_fetching import KVFetching, PendingFetch
from engine.parts.snapshot_kinds import SnapshotKinds

KINDS = SnapshotKinds(
    objects=(KVFetching, PendingFetch),
    methods=((KVFetching, "heard"),),
)
