"""Checks the LoRA adapters of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.cli.check.finding import Finding
from cluster.cli.check.part_check import PartCheck
from cluster.config.app_config import AppConfig
from cluster.config.model_section import ModelSection
from cluster.serve_config import ours
from deployments.routing.config import Role

GIB = 1 << 30


class LoRACheck(PartCheck):
    """Its other end imports torch, which takes seconds, so it does so only where there are adapters."""

    def configuration(self, serve_config: Mapping[str, Any]) -> Iterable[Finding]:
        models = [model for _, application in ours(serve_config) for model in AppConfig.of(application).models]
        if not any(model.lora_modules for model in models):
            return ()
        from cluster.cli.check.parts.lora.layers import check_listed

        return check_listed(serve_config)

    def pool(self, model: ModelSection, role: Role, topic: str) -> tuple[int, Iterable[Finding]]:
        engine = model.engine_config(role)
        if not engine.enable_lora:
            return 0, ()
        from cluster.cli.check.parts.lora.layers import check_adapters, layers_of

        layers = layers_of(model, role)
        slots = f"{engine.lora_slots} slots for adapters of rank {engine.max_lora_rank}"
        size = Finding("ok", topic, f"{slots}: {layers.slot_bytes / GIB:.2f} GiB per rank")
        return layers.slot_bytes, [size, *check_adapters(model, layers)]


CHECK = LoRACheck()
