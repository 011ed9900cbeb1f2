"""Options of images in prompts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_options import check_limits, option
from engine.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class ImageOptions(EngineOptions):
    encoder_cache_size: int = option(
        16_384,
        "Number of image embeddings that are cached, so that an image is encoded only once. No image may have "
        "more embeddings. A step makes at most `max_num_batched_tokens` embeddings.",
    )
    language_model_only: bool = option(
        False, "Serve a multimodal model as a text model: its image encoder is not loaded, and images are refused."
    )

    def check(self) -> None:
        super().check()
        check_limits(self, {"at least 1": "encoder_cache_size"})
