"""What a snapshot of a scheduler has of windows and recurrent states."""

from __future__ import annotations

from engine.parts.kv_groups.request_states import RequestStates, StateSnapshot
from engine.parts.kv_groups.state_cache_manager import StateCacheManager, StateSnapshots
from engine.parts.kv_groups.windowed_kv_cache import WindowedKVCacheManager, WindowRoom
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.parts.states import StateRestore, StateSave, StateStep

KINDS = SnapshotKinds(
    objects=(RequestStates, StateCacheManager, StateSnapshots, WindowRoom, WindowedKVCacheManager),
    messages=(StateStep,),
    rows=(StateRestore, StateSave, StateSnapshot),
)
