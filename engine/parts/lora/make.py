"""Makes the adapters of an engine."""

from __future__ import annotations

from engine.lora.group_loader import GroupLoader
from engine.parts.lora.adapter_courier import AdapterCourier, NoAdapterCourier
from engine.parts.lora.adapter_slots import AdapterSlots, NoAdapterSlots
from engine.parts.lora.rank.adapters import Adapters
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    config = setup.loaded.config
    if not config.enable_lora:
        return Made([NoAdapterSlots()], [NoAdapterCourier()])
    loader, slots = setup.loaded.runner.parts[Adapters].loader, AdapterSlots(config.lora_slots)
    assert loader is not None
    return Made([slots], [AdapterCourier(slots, GroupLoader(loader, setup.group.size, setup.broadcaster))])
