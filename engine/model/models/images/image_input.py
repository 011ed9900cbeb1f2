"""A model that takes images, beside text."""

from __future__ import annotations

from engine.model.config import ModelConfig
from engine.model.models.llama import LlamaForCausalLM
from engine.model.shard import ShardPlan
from engine.model.tensor_names import is_of_text
from engine.model.transformers_backend.vision import VisionEncoder


class TakesImages(LlamaForCausalLM):
    """Put before a family's class: the model with its vision encoder, in the stage that embeds tokens first."""

    def __init__(self, cfg: ModelConfig, tp: ShardPlan):
        super().__init__(cfg, tp)
        self._vision_config = cfg.vision if cfg.stage.is_first else None
        self.vision: VisionEncoder | None = None

    def add_encoders(self) -> None:
        if self._vision_config is not None:
            self.vision = VisionEncoder(self._vision_config)

    def canonical_name(self, name: str) -> str | None:
        if self.vision is None or is_of_text(name):
            return super().canonical_name(name)
        return self.vision.canonical_name(name)
