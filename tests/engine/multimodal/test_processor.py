from __future__ import annotations

import importlib
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.errors import ModelFolderError, PromptTooLong, RequestError
from engine.model.transformers_backend.vision import look_up
from engine.multimodal.invalid_image import InvalidImage
from engine.multimodal.processor import FAMILIES, ImageProcessor
from tests.engine.multimodal.images import SETTINGS, picture, processor, tokenizer

MARKERS = {name: FAMILIES[name].marker for name in SETTINGS}


@pytest.mark.parametrize("model_type", SETTINGS)
def test_each_image_has_its_place_in_the_prompt_and_as_many_placeholders_as_embeddings(tmp_path, model_type):
    images, marker = processor(tmp_path, model_type), MARKERS[model_type]
    first, second = (images.process(picture(*size), "image") for size in ((40, 24), (24, 60)))
    prompt, features = images.place(f"look at {marker} and {marker} this", [first, second], 1000)
    text, token = tokenizer(), SETTINGS[model_type][0]
    assert [text.token(i) for i in prompt[:2]] == ["look", "at"] and text.token(prompt[-1]) == "this"
    places = [i for i, token_id in enumerate(prompt) if text.token(token_id) == token]
    for feature, image in zip(features, (first, second), strict=True):
        position = feature.mm_position
        inside = [i for i in places if position.offset <= i < position.offset + position.length]
        assert len(inside) == feature.num_embeds == image.num_embeds
        assert (inside[0], inside[-1]) == (position.offset, position.offset + position.length - 1)
        assert feature.mm_hash == image.mm_hash
    assert sum(feature.num_embeds for feature in features) == len(places)
    assert features[0].mm_position.offset < features[1].mm_position.offset and first.mm_hash != second.mm_hash


PROCESSORS = {
    "qwen2_5_vl": "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "qwen3_vl": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "mistral3": "pixtral.processing_pixtral.PixtralProcessor",
    "gemma3": "gemma3.processing_gemma3.Gemma3Processor",
    "gemma4": "gemma4.processing_gemma4.Gemma4Processor",
    "internvl": "internvl.processing_internvl.InternVLProcessor",
}


@pytest.mark.parametrize("size", [(40, 24), (24, 60), (8, 8), (200, 30)])
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_placeholders_are_those_of_transformers(tmp_path, monkeypatch, model_type, size):
    # imported beside it, and needs torchvision
    unused = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, unused, SimpleNamespace(get_resize_output_image_size=None))
    module, _, name = PROCESSORS[model_type].rpartition(".")
    oracle = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    images, token = processor(tmp_path, model_type), SETTINGS[model_type][0]
    found = images.process(picture(*size), "image")
    inner = images._processor
    # what these methods read of a whole processor, which needs torchvision for videos
    whole = SimpleNamespace(
        image_processor=inner, image_token=token, patch_size=4, spatial_merge_size=2, image_seq_length=4,
        image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]", start_image_token="<img>",
        end_image_token="</img>", boi_token="<|image>", eoi_token="<image|>",
        full_image_sequence=f"\n\n<start_of_image>{token * 4}<end_of_image>\n\n",
    )  # fmt: skip
    outputs = inner(images=[picture(*size)], **images._options)
    assert found.placeholders == oracle.replace_image_token(whole, outputs, 0)


@pytest.mark.parametrize("steps", [{}, {"do_normalize": False}, {"do_rescale": False, "do_normalize": False}])
@pytest.mark.parametrize("model_type", SETTINGS)
def test_bytes_and_their_table_are_the_pixels_of_transformers_bit_by_bit(tmp_path, model_type, steps):
    images = processor(tmp_path, model_type, **steps)
    data = images.process(picture(200, 120), "image").data
    pixels, table = (torch.from_numpy(data[name].numpy().copy()) for name in ("pixel_values", "pixel_table"))
    assert pixels.dtype == torch.uint8
    expected = images._processor(images=[picture(200, 120)], **FAMILIES[model_type].options(images._config))
    assert np.array_equal(look_up(pixels, table).numpy(), np.asarray(expected["pixel_values"], dtype=np.float32))


def test_gemma_sees_the_whole_picture_whatever_its_processor_would_crop(tmp_path):
    found = processor(tmp_path, "gemma3", do_pan_and_scan=True).process(picture(48, 16), "image")
    assert found.num_embeds == 4 and found.data["pixel_values"].shape == (1, 3, 16, 16)


def test_the_same_picture_has_the_same_hash_in_any_prompt(tmp_path):
    images = processor(tmp_path, "qwen3_vl")
    first, again, other = (images.process(picture(40, 24, seed), "image") for seed in (1, 1, 2))
    assert first.mm_hash == again.mm_hash != other.mm_hash


@pytest.mark.parametrize("text", ["look at this", "<|image_pad|> <|image_pad|>"])
def test_a_prompt_that_does_not_show_each_image_once_is_refused(tmp_path, text):
    images = processor(tmp_path, "qwen3_vl")
    message = f"contains '<|image_pad|>' {text.count('<')} times for 1 images"
    with pytest.raises(RequestError, match=re.escape(message)):
        images.place(text, [images.process(picture(8, 8), "image")], 1000)


def test_a_text_with_the_placeholder_of_an_embedding_is_refused_beside_images(tmp_path):
    images = processor(tmp_path, "gemma3")
    with pytest.raises(RequestError, match="with images, no text may contain '<image_soft_token>'"):
        images.place("<image_soft_token> <start_of_image>", [images.process(picture(8, 8), "image")], 1000)


def test_images_that_do_not_fit_the_context_are_refused_before_the_prompt_is_made(tmp_path):
    images = processor(tmp_path, "qwen3_vl")
    image = images.process(picture(40, 24), "image")
    with pytest.raises(PromptTooLong, match=f": {2 * image.num_embeds} tokens > .* .counted no further"):
        images.place("<|image_pad|> <|image_pad|>", [image, image], 2 * image.num_embeds)
    with pytest.raises(PromptTooLong):
        images.place("look <|image_pad|>", [image], image.num_embeds + 1)
    assert len(images.place("look <|image_pad|>", [image], image.num_embeds + 2)[0]) == image.num_embeds + 1


def test_an_image_that_the_processor_refuses_is_named(tmp_path):
    images = processor(tmp_path, "qwen3_vl")
    with pytest.raises(InvalidImage, match=re.escape("messages[0].content[0] must be fit for this model")):
        images.process(picture(201, 1), "messages[0].content[0]")


def test_a_folder_whose_images_cannot_be_processed_is_refused(tmp_path):
    config = {"model_type": "qwen3_vl", "image_token_id": 10}
    with pytest.raises(ModelFolderError, match="its image processor cannot be read"):
        ImageProcessor.from_folder(tmp_path, config, tokenizer())
    with pytest.raises(ModelFolderError, match="images of model_type 'llama4'"):
        ImageProcessor.from_folder(tmp_path, {"model_type": "llama4"}, tokenizer())
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    with pytest.raises(ModelFolderError, match="image token 999 is not in the vocabulary"):
        ImageProcessor.from_folder(tmp_path, {**config, "image_token_id": 999}, tokenizer())
