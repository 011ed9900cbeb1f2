"""What encodes the images of a model, read from config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from engine.model.config_parts.fields import Fields, Unsupported
from engine.model.families import VISION


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A multimodal model's parts for images, which transformers' own code encodes."""

    transformers: str
    """config.json."""
    image_token_id: int
    """Placeholder of an embedding in a prompt."""
    deepstack: int = 0
    """Layers, the first ones, after which an image adds its own features."""
    merge_size: int = 1
    """Patches of an image's height, and of its width, that make one embedding."""
    mm_tokens_per_image: int = 0
    """Tokens of every image, in a model where they also see those behind them; 0 if they are read like text."""
    rope_axes: tuple[int, ...] = ()
    """What each rotary frequency turns by: 0 for the time of a token, 1 for its height, 2 for its width in an image;
    all are a text token's position. Empty if images have positions like text."""

    @classmethod
    def read(cls, raw: Fields, rotary_dim: int) -> VisionConfig | None:
        """raw: the whole config.json. rotary_dim: rotated values of a head. Returns None if images are not
        supported for this model, which is then served as a text model."""
        architecture, vision = (raw.get("architectures") or ["none"])[0], raw.get("vision_config")
        if architecture not in VISION or not vision:
            return None
        found = cls(
            transformers=json.dumps(raw, sort_keys=True),
            image_token_id=raw["image_token_id"] if "image_token_id" in raw else raw["image_token_index"],
            deepstack=len(vision.get("deepstack_visual_indexes") or ()),
            mm_tokens_per_image=raw.get("mm_tokens_per_image", 256) if raw.get("model_type") == "gemma3" else 0,
        )
        order = VISION[architecture]
        if order is None:
            return found
        text = {**raw, **(raw.get("text_config") or {})}
        sections = (text.get("rope_parameters") or text.get("rope_scaling") or {})["mrope_section"]
        if sum(sections) != rotary_dim // 2:
            raise Unsupported("mrope_section", sections)
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        if order == "interleaved":
            axes = [0] * len(axes)
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
        return replace(found, merge_size=vision["spatial_merge_size"], rope_axes=tuple(axes))
