"""Image files, and model folders with an image processor, a vocabulary and no weights."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from engine.multimodal.processor import ImageProcessor
from engine.text.chat_tokenizer import ChatTokenizer

SPECIAL = [
    "<|image_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<image_soft_token>", "<end_of_image>",
    "<|image>", "<|image|>", "<image|>", "<img>", "<IMG_CONTEXT>", "</img>",
]  # fmt: skip
QWEN: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
# by model_type: image token, fields of config.json, preprocessor_config.json
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("<|image_pad|>", {"vision_config": {"spatial_merge_size": 2}}, QWEN),
    "qwen3_vl": ("<|image_pad|>", {"vision_config": {"spatial_merge_size": 2}}, QWEN),
    "mistral3": (
        "[IMG]",
        {"vision_config": {"patch_size": 4}, "spatial_merge_size": 2},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}},
    ),
    "gemma3": (
        "<image_soft_token>",
        {"mm_tokens_per_image": 4},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    ),
    "gemma4": (
        "<|image|>",
        {},
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
    ),
    "internvl": (
        "<IMG_CONTEXT>",
        {"image_seq_length": 4},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "max_patches": 4},
    ),
}


TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }} "
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image_pad|> {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def tokenizer() -> ChatTokenizer:
    """One token per word, and per placeholder."""
    words = ["<unk>", "look", "at", "this", "and", "Here", "is", "the", "original", "image"]
    backend = tokenizers.Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    return ChatTokenizer(backend, {}, TEMPLATE)


def processor(folder: Path, model_type: str, **settings: Any) -> ImageProcessor:
    """settings: further ones of preprocessor_config.json."""
    image_token, config, own = SETTINGS[model_type]
    (folder / "preprocessor_config.json").write_text(json.dumps({**own, **settings}))
    text = tokenizer()
    config = {"model_type": model_type, "image_token_id": text.token_id(image_token), **config}
    return ImageProcessor.from_folder(folder, config, text)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
