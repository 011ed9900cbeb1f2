"""`LLM.chat` about images, with the image processor and the chat template of a model folder."""

from __future__ import annotations

import base64
import io
import json

import pytest
import tokenizers
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from engine import LLM, SamplingParams
from engine.errors import InvalidParameter
from engine.wire.parts.images import ImageStats
from tests.engine.multimodal.images import QWEN, picture
from tests.models import make_model
from tests.vision_models import BREAK, IMAGE, Prompt, expected_tokens, make_vision_model

SIZES = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ 'begin <|image_pad|>' if p['type'] == 'image' else p['text'] }} {% endfor %}{% endfor %}"
)


def save_tokenizer(folder) -> None:
    words = {f"w{i}": i for i in range(IMAGE)} | {"<|image_pad|>": IMAGE, "begin": BREAK}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken("<|image_pad|>", normalized=False)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def conversation(*seeds: int) -> list[dict]:
    images = [{"type": "image", "image": picture(24, 16, seed)} for seed in seeds]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "w7 w8"}]}]


def test_a_chat_about_images_gives_the_tokens_of_transformers(tmp_path):
    folder = make_vision_model(tmp_path, "qwen2_5_vl")
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN))
    with LLM(str(folder), **SIZES) as llm:
        outputs = llm.chat([conversation(1), conversation(), conversation(2, 1)], GREEDY, use_tqdm=False)
        assert llm.stats().record(ImageStats).encoded == 2
    for output, count in zip(outputs, (1, 0, 2), strict=True):
        assert len(output.mm_features) == count
        prompt = Prompt("qwen2_5_vl", output.prompt_token_ids, output.mm_features)
        assert prompt.tokens[-2:] == [7, 8]
        assert output.outputs[0].token_ids == expected_tokens(folder, prompt, 6)


def data_url(image) -> str:
    file = io.BytesIO()
    image.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def vision_llm(tmp_path_factory):
    folder = make_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN))
    with LLM(str(folder), **SIZES) as llm:
        yield llm


def test_an_image_is_the_same_in_a_chat_in_every_form_and_in_a_prompt_of_generate(vision_llm):
    image = picture(24, 16, 1)
    parts = [
        {"type": "image", "image": image},
        {"type": "image_pil", "image_pil": image},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
    ]
    text = {"type": "text", "text": "w7 w8"}
    chats = [[{"role": "user", "content": [part, text]}] for part in parts]
    outputs = vision_llm.chat(chats, GREEDY, use_tqdm=False)
    prompt = {"prompt": "begin <|image_pad|> w7 w8 ", "multi_modal_data": {"image": image}}
    outputs += vision_llm.generate([prompt, {**prompt, "multi_modal_data": {"image": [image]}}], GREEDY, use_tqdm=False)
    first, *others = outputs
    assert len(first.mm_features) == 1
    for output in others:
        assert output.prompt_token_ids == first.prompt_token_ids
        assert output.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "image_url must be a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url must be an image that"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "messages: type must be text or an image"),
        ({"type": "input_audio", "input_audio": {}}, "messages: type must be text or an image"),
    ],
)
def test_any_other_part_is_refused_by_name(vision_llm, part, message):
    with pytest.raises(InvalidParameter, match=message):
        vision_llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_a_chat_about_images_with_a_text_model_is_refused(tmp_path):
    refused = pytest.raises(InvalidParameter, match="messages must be text, because this model reads no images")
    with LLM(str(make_model(tmp_path, "llama", tokenizer=True)), **SIZES) as llm, refused:
        llm.chat(conversation(1), GREEDY, use_tqdm=False)
