"""Prepares images for a model's vision encoder, and puts their placeholders into prompts.

Pixels are processed by transformers' image processors that need Pillow and numpy, but not torchvision. The texts of the
placeholders follow transformers' `processing_*.py`, which itself needs packages that an ingress lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.errors import Described, ModelFolderError, PromptTooLong, RequestError
from engine.multimodal.invalid_image import InvalidImage
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange, TensorData, mm_hash

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFamily:
    """How the prompts of a model family represent an image."""

    marker: str
    """The text that the chat template writes for an image."""
    placeholders: Callable[[Fields, Fields, str], str]
    """Return the text that replaces the marker. Takes config.json, the image processor's output for one image, and the
    token that stands for one embedding."""
    arguments: tuple[str, ...]
    """Outputs of the image processor that the encoder takes besides `pixel_values`."""
    max_pixels: Callable[[Any], int]
    """Return roughly the maximum number of pixels that an image has after the image processor."""
    options: Callable[[Fields], dict[str, Any]] = lambda config: {}
    """Options of the image processor that follow from config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """An image as the encoder takes it, not yet placed in a prompt."""

    data: dict[str, TensorData]
    mm_hash: bytes
    placeholders: str
    """Text that represents the image in a prompt."""
    num_embeds: int


class ImageProcessor:
    """The image processor of one model. Several threads may use it at once."""

    def __init__(self, family: ImageFamily, config: Fields, processor: Any, tokenizer: ChatTokenizer, folder: Path):
        """config: the contents of config.json. processor: transformers' image processor. Raises ModelFolderError."""
        self._family, self._config, self._processor, self._tokenizer = family, config, processor, tokenizer
        self._options = {**family.options(config), "do_rescale": False, "do_normalize": False}
        self.max_bytes = 3 * family.max_pixels(processor)  #: most bytes of a processed image, roughly
        self._pixel_table = TensorData.of(_pixel_table(processor))
        token_id = config.get("image_token_id", config.get("image_token_index"))
        token = None if token_id is None else tokenizer.token(token_id)
        if token is None:
            raise ModelFolderError(str(folder), f"its image token {token_id} is not in the vocabulary")
        self._token_id, self._token = int(token_id), token

    @classmethod
    def from_folder(cls, folder: Path, config: Fields, tokenizer: ChatTokenizer) -> ImageProcessor:
        """Load a model's image processor. Imports torch, through transformers. Raises ModelFolderError."""
        from transformers import AutoImageProcessor

        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            known = ", ".join(FAMILIES)
            raise ModelFolderError(str(folder), f"images of model_type {config.get('model_type')!r}; known: {known}")
        try:
            found = AutoImageProcessor.from_pretrained(
                str(folder), backend="pil", trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # the type depends on which file is missing or broken
            reason = " ".join(str(error).split())[:300]
            raise ModelFolderError(str(folder), f"its image processor cannot be read: {reason}") from error
        return cls(family, config, found, tokenizer, folder)

    def process(self, image: Image.Image, field: str) -> ProcessedImage:
        """Return an image as the encoder takes it. May take a second, mostly without holding the GIL. field: the
        image's name in errors. Raises InvalidImage."""
        try:
            found = self._processor(images=[image], **self._options)
        except ValueError as error:
            size = Described(f"{image.width} × {image.height}")
            raise InvalidImage(field, size, f"fit for this model: {error}") from None
        tensors = {name: TensorData.of(np.asarray(found[name])) for name in self._family.arguments}
        pixels = np.asarray(found["pixel_values"]).astype(np.uint8)  # exact: some processors convert bytes to floats
        tensors |= {"pixel_values": TensorData.of(pixels), "pixel_table": self._pixel_table}
        text = self._family.placeholders(self._config, found, self._token)
        return ProcessedImage(
            data=tensors, mm_hash=mm_hash(tensors), placeholders=text, num_embeds=text.count(self._token)
        )

    def expand(self, text: str, images: Sequence[ProcessedImage], max_model_len: int) -> str:
        """Return a rendered conversation with each image marker replaced by the placeholders of its image.

        Raises PromptTooLong, and RequestError if the text does not have exactly one marker per image.
        """
        if not images:
            return text
        marker = self._family.marker
        parts = text.split(marker)
        if len(parts) - 1 != len(images):
            message = f"the prompt contains {marker!r} {len(parts) - 1} times for {len(images)} images: "
            message += "texts must not contain it, and the chat template must write it for each image"
            raise RequestError(message, "messages")
        needed = sum(image.num_embeds for image in images)
        if needed >= max_model_len:
            raise PromptTooLong(needed, max_model_len, estimated=True)
        return parts[0] + "".join(image.placeholders + part for image, part in zip(images, parts[1:], strict=True))

    def num_markers(self, text: str) -> int:
        """Return how many images a rendered conversation shows."""
        return text.count(self._family.marker)

    def place(
        self, text: str, images: Sequence[ProcessedImage], max_model_len: int, add_special_tokens: bool = False
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Return the tokens of a prompt, and the position of each image in it. Raises like `expand`."""
        whole = self.expand(text, images, max_model_len)
        prompt = self._tokenizer.encode_prompt(whole, max_model_len, add_special_tokens)
        return prompt, self.locate(prompt, images)

    def locate(self, prompt: Sequence[int], images: Sequence[ProcessedImage]) -> list[MultiModalFeatureSpec]:
        """Return the position of each image in the tokens of an expanded text. Raises RequestError for a text that
        contains placeholders of its own."""
        places = [i for i, token_id in enumerate(prompt) if token_id == self._token_id]
        if len(places) != sum(image.num_embeds for image in images):
            raise RequestError(f"messages: with images, no text may contain {self._token!r}", "messages")
        features, start = [], 0
        for image in images:
            first, last = places[start], places[start + image.num_embeds - 1]
            start += image.num_embeds
            feature = MultiModalFeatureSpec(
                data=image.data,
                mm_hash=image.mm_hash,
                mm_position=PlaceholderRange(first, last - first + 1),
                num_embeds=image.num_embeds,
            )
            features.append(feature)
        return features


def _pixel_table(processor: Any) -> np.ndarray:
    """Return the image processor's output for each byte in each channel: [3, 256] float32.

    Rescaling and normalising treat each value separately, so a table gives the same bits.
    """
    ramp: np.ndarray = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
    if processor.do_rescale:
        ramp = processor.rescale(ramp, processor.rescale_factor)
    if processor.do_normalize:
        ramp = processor.normalize(ramp, processor.image_mean, processor.image_std)
    return ramp[:, 0].astype(np.float32)


def _qwen(config: Fields, found: Fields, token: str) -> str:
    merge = config["vision_config"].get("spatial_merge_size", 2)
    return token * (math.prod(np.asarray(found["image_grid_thw"])[0].tolist()) // merge**2)


def _pixtral_patch(config: Fields) -> int:
    return int(config["vision_config"]["patch_size"] * config.get("spatial_merge_size", 1))


def _pixtral(config: Fields, found: Fields, token: str) -> str:
    height, width = (side // _pixtral_patch(config) for side in found["image_sizes"][0])
    return "[IMG_BREAK]".join([token * width] * height) + "[IMG_END]"


def _gemma3(config: Fields, found: Fields, token: str) -> str:
    return f"\n\n<start_of_image>{token * config.get('mm_tokens_per_image', 256)}<end_of_image>\n\n"


def _gemma4(config: Fields, found: Fields, token: str) -> str:
    return f"<|image>{token * int(found['num_soft_tokens_per_image'][0])}<image|>"


def _internvl(config: Fields, found: Fields, token: str) -> str:
    return f"<img>{token * (config.get('image_seq_length', 256) * found['num_patches'][0])}</img>"


def _tile(processor: Any) -> int:
    return int(processor.size.height * processor.size.width)


_QWEN = ImageFamily(
    marker="<|image_pad|>",
    placeholders=_qwen,
    arguments=("image_grid_thw",),
    max_pixels=lambda processor: processor.size.longest_edge * processor.temporal_patch_size,
)
_PIXTRAL = ImageFamily(
    marker="[IMG]",
    placeholders=_pixtral,
    arguments=("image_sizes",),
    max_pixels=lambda processor: (processor.size.longest_edge or max(processor.size.height, processor.size.width)) ** 2,
    options=lambda config: {"patch_size": {"height": _pixtral_patch(config), "width": _pixtral_patch(config)}},
)
FAMILIES = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "mistral3": _PIXTRAL,
    "gemma3": ImageFamily(
        marker="<start_of_image>",
        placeholders=_gemma3,
        arguments=(),
        max_pixels=_tile,
        options=lambda config: {"do_pan_and_scan": False},  # pan and scan would add crops as further images
    ),
    "gemma4": ImageFamily(
        marker="<|image|>",
        placeholders=_gemma4,
        arguments=("image_position_ids",),
        max_pixels=lambda processor: (
            processor.max_soft_tokens * (processor.pooling_kernel_size * processor.patch_size) ** 2
        ),
    ),
    "internvl": ImageFamily(
        marker="<IMG_CONTEXT>",
        placeholders=_internvl,
        arguments=(),
        max_pixels=lambda processor: _tile(processor) * (1 + processor.max_patches),
        options=lambda config: {"crop_to_patches": True},
    ),
}
"""The processors by `model_type` of config.json. Llama 4 and Gemma 4 12B are missing: their image processors need
torchvision."""
