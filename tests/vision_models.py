"""Tiny multimodal models with random weights, made by transformers itself, and images for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange, TensorData, mm_hash
from tests.engine.multimodal.images import QWEN
from tests.models import COMMON, EOS, FAMILIES, HYBRIDS, PARTIAL_ROPE, make_tokenizer, randomise
from tests.transformers_models import known_fields

IMAGE, BREAK, END = 90, 91, 92  # token ids
PATCH, MERGE = 4, 2  # pixels of a patch, and patches of an embedding, in height and in width
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
}
QWEN35_TOWER = {**QWEN_TOWER, "num_position_embeddings": 64}
QWEN3_TOWER = {**QWEN35_TOWER, "deepstack_visual_indexes": [0, 1]}
IMAGE_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA4_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": PATCH,
    "pooling_kernel_size": MERGE,
    "position_embedding_size": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4}
# class, configuration of its text, fields of the text, fields of the tower, and other fields
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3TextConfig",
        {**FAMILIES["gemma3"][1], "tie_word_embeddings": False},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 6 * PATCH,
            "patch_size": PATCH,
        },
        {"mm_tokens_per_image": 9},
    ),
    # as E2B, and as 31B, where a token of an image also sees later ones
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        "Gemma4TextConfig",
        FAMILIES["gemma4"][1],
        GEMMA4_TOWER,
        {"audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}},
    ),
    "gemma4_moe": (
        "Gemma4ForConditionalGeneration",
        "Gemma4TextConfig",
        FAMILIES["gemma4_moe"][1],
        {**GEMMA4_TOWER, "use_clipped_linears": True, "standardize": True},
        {"audio_config": None, "vision_soft_tokens_per_image": 9},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "Qwen2Config",
        {},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [4 * PATCH] * 2,
            "patch_size": [PATCH] * 2,
        },
        {"image_seq_length": 4},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "MistralConfig",
        {"sliding_window": None},
        {
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 64,
            "patch_size": PATCH,
        },
        {"spatial_merge_size": MERGE},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLTextConfig",
        {"head_dim": 12, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2]}},
        {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        {},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLTextConfig",
        {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}},
        QWEN3_TOWER,
        {},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5TextConfig",
        {**HYBRIDS["qwen3_5"][1], "rope_parameters": {**PARTIAL_ROPE, "mrope_section": [2, 1, 1]}},
        QWEN35_TOWER,
        {},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeTextConfig",
        {**HYBRIDS["qwen3_5_moe"][1], "rope_parameters": {**PARTIAL_ROPE, "mrope_section": [2, 1, 1]}},
        QWEN35_TOWER,
        {},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeTextConfig",
        {**FAMILIES["qwen3_moe"][1], "mlp_only_layers": [], "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}},
        QWEN3_TOWER,
        {},
    ),
}

WHOLE_IMAGES = ("gemma3", "gemma4_moe")  # models of which a step computes whole images
RECURRENT = ("qwen3_5", "qwen3_5_moe")  # whose prompts here are too short for a snapshot of their states


@dataclass
class Prompt:
    """Token ids with their images. `text` and `image` append to both."""

    name: str
    tokens: list[int] = field(default_factory=list)
    images: list[MultiModalFeatureSpec] = field(default_factory=list)

    def text(self, *tokens: int) -> Prompt:
        self.tokens += tokens
        return self

    def image(self, seed: int, height: int = 2, width: int = 3) -> Prompt:
        """height, width: in embeddings. Images of Gemma 3 and the larger Gemma 4 have 3
        each, one more than the window, and InternVL's have
        `height` tiles of 4."""
        height, width = {"gemma3": (3, 3), "gemma4_moe": (3, 3), "internvl": (height, 4)}.get(
            self.name, (height, width)
        )
        row, mistral = [IMAGE] * width, self.name == "mistral3"
        ids = [*([*row, BREAK] * (height - 1)), *row, END] if mistral else row * height
        self.tokens += [] if mistral else [BREAK]  # without which transformers takes two images for one
        data = pixels(self.name, seed, height * MERGE, width * MERGE)
        place = PlaceholderRange(len(self.tokens), len(ids))
        feature = MultiModalFeatureSpec(data=data, mm_hash=mm_hash(data), mm_position=place, num_embeds=height * width)
        self.images.append(feature)
        self.tokens += ids
        return self


def pixels(name: str, seed: int, height: int, width: int) -> dict[str, TensorData]:
    """What an image processor makes of an image of so many patches."""
    random = np.random.default_rng(seed)
    if name.startswith("gemma4"):  # as many patches in all images, of which some are padding
        count = max(10 * MERGE**2, height * width)
        values, places = np.zeros((1, count, 3 * PATCH**2), np.float32), np.full((1, count, 2), -1)
        values[0, : height * width] = random.random((height * width, 3 * PATCH**2))
        places[0, : height * width] = [(x, y) for y in range(height) for x in range(width)]
        return {"pixel_values": TensorData.of(values), "image_position_ids": TensorData.of(places)}
    if name == "mistral3":
        shape, key, size = (1, 3, height * PATCH, width * PATCH), "image_sizes", [[height * PATCH, width * PATCH]]
    else:
        shape, key, size = (height * width, 3 * 2 * PATCH**2), "image_grid_thw", [[1, height, width]]
    if name in ("gemma3", "internvl"):
        shape = (1, 3, 6 * PATCH, 6 * PATCH) if name == "gemma3" else (height // MERGE, 3, 4 * PATCH, 4 * PATCH)
        return {"pixel_values": TensorData.of(random.normal(size=shape).astype(np.float32))}
    values = random.normal(size=shape).astype(np.float32)
    return {"pixel_values": TensorData.of(values), key: TensorData.of(np.array(size))}


def make_vision_model(folder: Path, name: str, image_token_id: int = IMAGE, **overrides: Any) -> Path:
    """Write a model of MODELS into `folder`, float32, and return it. overrides: fields of its text part."""
    cls_name, text_class, text, vision, others = MODELS[name]
    text = {**COMMON, **text, **overrides}
    if "out_hidden_size" in vision:
        vision = {**vision, "out_hidden_size": text["hidden_size"]}
    cls, text_config = getattr(transformers, cls_name), getattr(transformers, text_class)
    config = cls.config_class(
        text_config=text_config(**known_fields(text_config, text)).to_dict(),
        vision_config=vision,
        image_token_id=image_token_id,
        **others,
    )
    model = cls(config).eval()
    randomise(model, tied=config.tie_word_embeddings, seed=1)
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(folder)
    return Path(folder)


def make_vision_chat_model(folder: Path) -> Path:
    """Write a small Qwen3-VL that takes images over HTTP: a model folder with a byte-level tokenizer, a chat template
    and an image processor."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    tokenizer.chat_template = IMAGE_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    eos, image_token_id = ids("<|im_end|>"), ids("<|image_pad|>")
    make_vision_model(folder, "qwen3_vl", image_token_id, vocab_size=len(tokenizer), eos_token_id=eos)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN))
    return folder


@cache
def transformers_model(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def encoder_arguments(image: MultiModalFeatureSpec) -> dict[str, np.ndarray]:
    arrays = {name: tensor.numpy().copy() for name, tensor in image.data.items()}
    table = arrays.pop("pixel_table", None)
    if table is not None:
        values = arrays["pixel_values"]
        channels = values.reshape(len(values), 3, -1).swapaxes(0, 1)
        found = np.stack([own[channel] for own, channel in zip(table, channels, strict=True)], axis=1)
        arrays["pixel_values"] = found.reshape(values.shape)
    return arrays


def model_inputs(prompt: Prompt) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a prompt."""
    ids = torch.tensor([prompt.tokens])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.images:
        arrays = [encoder_arguments(image) for image in prompt.images]
        if prompt.name == "mistral3":
            height, width = np.max([a["pixel_values"].shape[2:] for a in arrays], axis=0)
            for a in arrays:
                own = a["pixel_values"]
                a["pixel_values"] = np.pad(own, ((0, 0), (0, 0), (0, height - own.shape[2]), (0, width - own.shape[3])))
        elif prompt.name != "internvl":
            types = "token_type_ids" if prompt.name == "gemma3" else "mm_token_type_ids"
            inputs[types] = (ids == IMAGE).int()
        inputs |= {name: torch.from_numpy(np.concatenate([a[name] for a in arrays])) for name in arrays[0]}
    return inputs


@torch.no_grad()
def expected_logprobs(folder: Path, prompt: Prompt) -> torch.Tensor:
    """[vocab_size], of the token after the prompt."""
    return transformers_model(folder)(**model_inputs(prompt)).logits[0, -1].log_softmax(-1)


continuations: dict[tuple[object, ...], list[int]] = {}
"""What `expected_tokens` has found, for which several tests ask."""


def expected_tokens(folder: Path, prompt: Prompt, max_tokens: int) -> list[int]:
    """The greedy continuation by transformers; it ends where the model does.

    Qwen's prompts have to end with text: behind an image, `generate` goes on from the last position of each axis, where
    the model's own `get_rope_index` (and the engine) goes on from the highest one.
    """
    key = folder, max_tokens, *prompt.tokens, *(image.mm_hash for image in prompt.images)
    if key not in continuations:
        out = transformers_model(folder).generate(**model_inputs(prompt), max_new_tokens=max_tokens, do_sample=False)
        continuations[key] = out[0, len(prompt.tokens) :].tolist()
    return continuations[key]
