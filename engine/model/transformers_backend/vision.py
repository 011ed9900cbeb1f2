"""The image encoder of a multimodal model, vision tower and projector: transformers' code with the kernels
of our linear layers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from engine.devices.device import copy_to
from engine.model.config_parts.vision import VisionConfig
from engine.model.layers.linear import packed
from engine.model.ops import linear
from engine.model.shard import Sharded, Shards
from engine.model.transformers_backend import tower_attention
from engine.model.transformers_backend.model import EmptyOnMeta, materialize, whole
from engine.wire.parts.images import TensorData

PIXELS = {"pixel_values", "pixel_table"}
TOGETHER = {*PIXELS, "image_grid_thw"}  # of images that one call can encode
AUDIO = ("audio_tower.", "embed_audio.")


def look_up(pixels: Tensor, table: Tensor) -> Tensor:
    """Return the values of pixels from a table: see MultiModalFeatureSpec.data.

    pixels: [n, ...] uint8. table: [3, 256]. Works channel by channel, since an index takes four bytes per value.
    """
    found = table.new_empty(pixels.shape)
    by_channel, values = (tensor.view(len(pixels), len(table), -1) for tensor in (found, pixels))
    for channel, levels in enumerate(table):
        by_channel[:, channel] = levels[values[:, channel].int()]
    return found


class TowerLinear(nn.Module):
    """A linear layer computed by our kernels: [..., inputs] -> [..., outputs]."""

    def __init__(self, layer: nn.Linear | nn.Conv2d | nn.Conv3d):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out = linear.linear(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.bias)
        return out.view(*x.shape[:-1], -1)

    def pack(self) -> None:
        self.weight = packed(nn.Parameter(self.weight.flatten(1), requires_grad=False))


class TowerPatches(TowerLinear):
    """A convolution whose windows do not overlap, as one product: [n, channels, *sizes] -> [n, outputs, *windows].
    torch's own is slow in bfloat16 on CPUs without instructions for it, and with some versions of cuDNN (pytorch
    #166122)."""

    def __init__(self, layer: nn.Conv2d | nn.Conv3d):
        super().__init__(layer)
        self.kernel_size = layer.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        for dim, size in enumerate(self.kernel_size, 2):
            x = x.unfold(dim, size, size)
        x = x.movedim(1, 1 + len(self.kernel_size))  # [n, *windows, channels, *kernel_size]
        return super().forward(x.flatten(1 + len(self.kernel_size))).movedim(-1, 1)


def with_own_kernels(model: nn.Module) -> None:
    """Replace the layers of a tower that our linear kernels can compute."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            model.set_submodule(name, TowerLinear(layer))
        elif isinstance(layer, nn.Conv2d | nn.Conv3d) and layer.stride == layer.kernel_size:
            plain = layer.groups == 1 and set(layer.dilation) == {1} and set(layer.padding) in ({0}, set("valid"))
            if plain:
                model.set_submodule(name, TowerPatches(layer))


class VisionEncoder(Sharded):
    """The encoder: images from transformers' image processor -> [embeddings of all, (1 + deepstack) * hidden].

    Every rank holds all of it and encodes every image, since a tower is small compared with its language model, and
    embeddings then need not be sent.
    """

    def __init__(self, cfg: VisionConfig):
        super().__init__()
        raw = json.loads(cfg.transformers)
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        text = config.get_text_config()  # of the language model, which is dropped below
        text.num_hidden_layers, text.num_kv_shared_layers = 1, 0
        config.audio_config = None
        with EmptyOnMeta(), no_init_weights():
            model = MODEL_MAPPING[type(config)]._from_config(config, dtype=self.dtype)
        self._renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
        model.language_model = None
        if hasattr(model, "visual"):  # Qwen's towers
            model.visual.config._attn_implementation = tower_attention.NAME
        with_own_kernels(model)
        materialize(model, self.device)
        self.model = model.eval().requires_grad_(False)

    def forward(self, *images: dict[str, TensorData]) -> Tensor:
        """Encode one image, or several that `go_together`. The host computes what depends on their sizes,
        and does not wait for the device."""
        model: Any = self.model
        data = images[0]
        values, places = np.concatenate([image["pixel_values"].numpy() for image in images]), None
        if hasattr(getattr(model, "vision_tower", None), "patch_embedder"):  # Gemma 4's
            where = data["image_position_ids"].numpy()
            real = (where != -1).any(-1)  # not padding, which the tower would look for on the device
            values, places = values[real][None], where[real][None]
        pixels = copy_to(values, self.device)
        if (table := data.get("pixel_table")) is not None:
            pixels = look_up(pixels, copy_to(table.numpy().copy(), self.device))
        pixels = pixels.to(self.dtype)
        if places is not None:
            return self._encode_patches(pixels, copy_to(places, self.device))
        if "image_grid_thw" in data:
            sizes = torch.from_numpy(np.concatenate([image["image_grid_thw"].numpy() for image in images]))
            inputs = tower_attention.grid_inputs(model.visual, sizes, self.device)
            output = model.visual(pixels, grid_thw=sizes, return_dict=True, **inputs)
            levels = getattr(output, "deepstack_features", None) or ()
            return torch.cat([output.pooler_output, *levels], dim=-1)
        if (size := data.get("image_sizes")) is not None:
            sizes = size.numpy().tolist()
            layer = model.config.vision_feature_layer
            hidden = model.vision_tower(pixels, image_sizes=sizes, output_hidden_states=True).hidden_states
            chosen = [hidden[i] for i in ([layer] if isinstance(layer, int) else layer)]
            return model.multi_modal_projector(torch.cat(chosen, dim=-1).squeeze(0), sizes)
        others = {name: copy_to(data[name].numpy().copy(), self.device) for name in data.keys() - PIXELS}
        output = model.get_image_features(pixel_values=pixels, **others)
        return torch.cat(list(output.pooler_output))  # of each image, as a whole or tile by tile

    def _encode_patches(self, pixels: Tensor, places: Tensor) -> Tensor:
        """Encode an image with Gemma 4's tower, as the tower's own `forward` does where there is no padding.

        pixels: [1, patches, values]. places: [1, patches, 2] int64, column and row of each patch.
        """
        model: Any = self.model
        tower, padding = model.vision_tower, torch.zeros(places.shape[:2], dtype=torch.bool, device=self.device)
        x = tower.patch_embedder(pixels, places, padding)
        hidden = tower.encoder(inputs_embeds=x, attention_mask=None, pixel_position_ids=places).last_hidden_state
        count = places.shape[1] // tower.config.pooling_kernel_size**2
        pooled, _ = tower.pooler(hidden, places, padding, count)
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        return model.embed_vision(inputs_embeds=pooled.to(x.dtype))[0]

    @staticmethod
    def go_together(one: dict[str, TensorData], other: dict[str, TensorData]) -> bool:
        """Return whether one call can encode both images: their patches or tiles have the same shape, and nothing else
        but the size of a grid of patches differs between them."""
        if one.keys() != other.keys() or not one.keys() <= TOGETHER:
            return False
        shapes = [image["pixel_values"].shape[1:] for image in (one, other)]
        return shapes[0] == shapes[1] and one.get("pixel_table") == other.get("pixel_table")

    def pack(self) -> None:
        for layer in self.model.modules():
            if isinstance(layer, TowerLinear):
                layer.pack()

    def canonical_name(self, name: str) -> str | None:
        """Return `vision.model.vision_tower.ln_pre.weight` for `vision_tower.ln_pre.weight`, as transformers 4 saved
        it, and for `model.vision_tower.ln_pre.weight`; None for a tensor of the model's audio input."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        name = name.removeprefix("model.")
        return None if name.startswith(AUDIO) else f"vision.model.{name}"

    def shards(self) -> Shards:
        return {name: whole(torch.atleast_1d(tensor.data)) for name, tensor in self.state_dict(keep_vars=True).items()}
