"""What a snapshot of a scheduler has of adapters."""

from __future__ import annotations

import msgspec

from engine.lora.messages import AdapterLoad, SequenceAdapter
from engine.parts.lora.adapter_slots import AdapterSlot, AdapterSlots, NoAdapterSlots
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.parts.adapter import ModelAdapter


def load_without_path(load: AdapterLoad) -> AdapterLoad:
    return msgspec.structs.replace(load, lora=load.lora.without_text())


KINDS = SnapshotKinds(
    objects=(AdapterSlot, AdapterSlots, NoAdapterSlots),
    messages=(AdapterLoad, ModelAdapter, SequenceAdapter),
    stands_for={AdapterLoad: load_without_path, ModelAdapter: ModelAdapter.without_text},
)
