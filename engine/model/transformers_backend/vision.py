"""The part of a multimodal model that sees: vision tower and projector, as transformers computes them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from engine.device import copy_to
from engine.model.config import VisionConfig
from engine.model.shard import Sharded, Shards
from engine.model.transformers_backend.model import EmptyOnMeta, materialize, whole
from engine.wire.multimodal import TensorData


def look_up(pixels: Tensor, table: Tensor) -> Tensor:
    """Return what pixels stand for; see MultiModalFeatureSpec.data.

    pixels: [n, ...] uint8. table: [3, 256]. One channel at a time, since an index takes four bytes.
    """
    found = table.new_empty(pixels.shape)
    by_channel, values = (tensor.view(len(pixels), len(table), -1) for tensor in (found, pixels))
    for channel, levels in enumerate(table):
        by_channel[:, channel] = levels[values[:, channel].int()]
    return found


class VisionEncoder(Sharded):
    """An image, as transformers' image processor made it -> [embeddings, (1 + deepstack) * hidden].

    Every rank holds all of it and encodes every image: a tower is small beside its language model, and the embeddings
    need not travel. None of this has run on a GPU yet.
    """

    def __init__(self, cfg: VisionConfig):
        super().__init__()
        raw = json.loads(cfg.transformers)
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        config.get_text_config().num_hidden_layers = 1  # of the language model, which is ours
        with EmptyOnMeta(), no_init_weights():
            model = MODEL_MAPPING[type(config)]._from_config(config, dtype=self.dtype)
        self._renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
        model.language_model = None
        materialize(model, self.device)
        self.model = model.eval().requires_grad_(False)

    def forward(self, data: dict[str, TensorData]) -> Tensor:
        inputs = {name: copy_to(tensor.numpy().copy(), self.device) for name, tensor in data.items()}
        table = inputs.pop("pixel_table", None)
        pixels = inputs["pixel_values"]
        inputs["pixel_values"] = (pixels if table is None else look_up(pixels, table)).to(self.dtype)
        output: Any = self.model.get_image_features(**inputs)
        levels = [level[0] for level in getattr(output, "deepstack_features", None) or ()]
        embeddings = torch.cat(list(output.pooler_output))  # of one image: its rows of tiles, or all of it
        return torch.cat([embeddings, *levels], dim=-1)

    def canonical_name(self, name: str) -> str:
        """`vision_tower.ln_pre.weight`, as transformers 4 saved it, and `model.vision_tower.ln_pre.weight` ->
        `vision.model.vision_tower.ln_pre.weight`."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return f"vision.model.{name.removeprefix('model.')}"

    def shards(self) -> Shards:
        return {name: whole(tensor.data) for name, tensor in self.state_dict(keep_vars=True).items()}
