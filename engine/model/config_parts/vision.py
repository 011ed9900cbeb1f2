"""Reads the options of config.json that are needed to encode images."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from engine.model.checkpoint.fields import Fields, Unsupported

# Models with image input, and how their rotary frequencies are assigned to time, height and width: in one section per
# axis (Qwen2-VL, arXiv:2409.12191), interleaved (Qwen3-VL, arXiv:2511.21631), or None if positions have one axis.
VISION: dict[str, Literal["sections", "interleaved"] | None] = {
    "Gemma3ForConditionalGeneration": None,
    "Gemma4ForConditionalGeneration": None,
    "InternVLForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "Qwen2_5_VLForConditionalGeneration": "sections",
    "Qwen3VLForConditionalGeneration": "interleaved",
    "Qwen3VLMoeForConditionalGeneration": "interleaved",
    "Qwen3_5ForConditionalGeneration": "interleaved",
    "Qwen3_5MoeForConditionalGeneration": "interleaved",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The image input of a multimodal model. transformers' own code encodes the images."""

    transformers: str
    """The contents of config.json."""
    image_token_id: int
    """Token that stands for one image embedding in a prompt."""
    deepstack: int = 0
    """Number of first layers after which image features are added (DeepStack)."""
    merge_size: int = 1
    """Number of patches in height, and in width, that become one embedding."""
    mm_tokens_per_image: int = 0
    """Maximum number of tokens of an image, in a model whose image tokens see each other in both directions; 0 if they
    see only earlier tokens."""
    causal_without_window: bool = False
    """Whether image tokens see each other only in layers with a window."""
    rope_axes: tuple[int, ...] = ()
    """The axis of each rotary frequency: 0 for time, 1 for height in the image, 2 for width. For a text token, all
    three are its position. Empty if image tokens have positions like text."""

    @classmethod
    def read(cls, raw: Fields, rotary_dim: int) -> VisionConfig | None:
        """Return the image input; None if it is not supported, so that the model is served as a text model. raw: the
        contents of config.json. rotary_dim: number of rotated values per head."""
        architecture, vision = (raw.get("architectures") or ["none"])[0], raw.get("vision_config")
        if architecture not in VISION or not vision:
            return None
        size, text, gemma4 = 0, raw | (raw.get("text_config") or {}), raw.get("model_type") == "gemma4"
        if raw.get("model_type") == "gemma3":
            size = raw.get("mm_tokens_per_image", 256)
        elif gemma4 and text.get("use_bidirectional_attention") == "vision":
            size = raw.get("vision_soft_tokens_per_image", 280)
        found = cls(
            transformers=json.dumps(raw, sort_keys=True),
            image_token_id=raw["image_token_id"] if "image_token_id" in raw else raw["image_token_index"],
            deepstack=len(vision.get("deepstack_visual_indexes") or ()),
            mm_tokens_per_image=size,
            causal_without_window=gemma4,
        )
        order = VISION[architecture]
        if order is None:
            return found
        sections = (text.get("rope_parameters") or text.get("rope_scaling") or {})["mrope_section"]
        if sum(sections) != rotary_dim // 2:
            raise Unsupported("mrope_section", sections)
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        if order == "interleaved":
            axes = [0] * len(axes)
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
        return replace(found, merge_size=vision["spatial_merge_size"], rope_axes=tuple(axes))
