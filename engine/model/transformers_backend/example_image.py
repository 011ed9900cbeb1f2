"""Makes black images of a given size, in the form in which a model's image processor returns images."""

from __future__ import annotations

import json
import math

import numpy as np

from engine.model.config_parts.vision import VisionConfig
from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange, TensorData, mm_hash

CHANNELS = 3
MOST_TOKENS = 280  # of an image of Gemma 4, unless config.json says otherwise
MOST_TILES = 13  # of InternVL's image processor by default: 12, and one of the whole image


def example_image(cfg: VisionConfig, num_embeds: int) -> MultiModalFeatureSpec:
    """Return an image with about `num_embeds` embeddings, but at least one tile, and no more embeddings than one image
    can have. The image begins at the first token of its prompt."""
    raw = json.loads(cfg.transformers)
    vision, patch = raw["vision_config"], raw["vision_config"]["patch_size"]
    height = max(1, math.isqrt(num_embeds))
    width = max(1, num_embeds // height)
    arrays: dict[str, np.ndarray] = {}
    if "spatial_merge_size" in vision:  # Qwen: any size, as a list of patches
        merge, frames = vision["spatial_merge_size"], vision.get("temporal_patch_size", 2)
        arrays["image_grid_thw"] = np.array([[1, merge * height, merge * width]])
        shape: tuple[int, ...] = (merge**2 * height * width, CHANNELS * frames * patch**2)
    elif "pooling_kernel_size" in vision:  # Gemma 4: any size up to its most tokens, as a list of patches
        pool, most = vision["pooling_kernel_size"], raw.get("vision_soft_tokens_per_image", MOST_TOKENS)
        height = min(height, math.isqrt(most))
        width = min(width, most // height)
        shape = (1, pool**2 * height * width, CHANNELS * patch**2)
        places = [(x, y) for y in range(pool * height) for x in range(pool * width)]
        arrays["image_position_ids"] = np.array([places])
    elif "spatial_merge_size" in raw:  # Pixtral: any size up to that of its table of positions
        unit = patch * raw["spatial_merge_size"]
        height, width = (min(side, vision["image_size"] // unit) for side in (height, width))
        shape = (1, CHANNELS, height * unit, width * unit)
        arrays["image_sizes"] = np.array([shape[2:]])
    else:  # tiles of one size
        per_tile = cfg.mm_tokens_per_image or raw.get("image_seq_length", 256)
        tiles = 1 if cfg.mm_tokens_per_image else min(MOST_TILES, max(1, num_embeds // per_tile))
        height, width, size = tiles, per_tile, vision["image_size"]
        shape = (tiles, CHANNELS, *(size if isinstance(size, list) else [size] * 2))
    arrays["pixel_values"] = np.zeros(shape, dtype=np.uint8)
    arrays["pixel_table"] = np.zeros((CHANNELS, 256), dtype=np.float32)
    data = {name: TensorData.of(array) for name, array in arrays.items()}
    found = height * width
    return MultiModalFeatureSpec(
        data=data, mm_hash=mm_hash(data), mm_position=PlaceholderRange(0, found), num_embeds=found
    )
