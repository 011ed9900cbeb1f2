"""What a snapshot of a scheduler has of adapters."""

from __future__ import annotations

import msgspec

from engine.parts.lora.adapter_slots import AdapterSlot, AdapterSlots
from engine.parts.snapshot_kinds import SnapshotKinds
from engine.wire.lora import AdapterLoad, LoRARequest
from engine.wire.parts.lora import SequenceAdapter


def without_path(lora: LoRARequest) -> LoRARequest:
    """Return what tells an adapter from others."""
    return LoRARequest(lora.lora_name, 0, "", lora.digest)


def load_without_path(load: AdapterLoad) -> AdapterLoad:
    return msgspec.structs.replace(load, lora=without_path(load.lora))


KINDS = SnapshotKinds(
    objects=(AdapterSlot, AdapterSlots),
    messages=(AdapterLoad, LoRARequest, SequenceAdapter),
    stands_for={AdapterLoad: load_without_path, LoRARequest: without_path},
)
