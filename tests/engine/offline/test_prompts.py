"""Forms of prompts."""

from __future__ import annotations

import pytest
from PIL import Image

from engine.errors import RequestError
from engine.offline.prompts import ParsedPrompt, parse_prompts

PICTURE = Image.new("RGB", (2, 2))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [ParsedPrompt("a")]),
        ([1, 2], [ParsedPrompt(None, [1, 2])]),
        (["a", [1, 2]], [ParsedPrompt("a"), ParsedPrompt(None, [1, 2])]),
        ([], []),
        ({"prompt": "a"}, [ParsedPrompt("a")]),
        ({"prompt_token_ids": [1, 2]}, [ParsedPrompt(None, [1, 2])]),
        ({"prompt_token_ids": [1], "prompt": "a"}, [ParsedPrompt("a", [1])]),
        ([{"prompt": "a"}, {"prompt": "b"}, "c"], [ParsedPrompt("a"), ParsedPrompt("b"), ParsedPrompt("c")]),
        ({"prompt": "a", "cache_salt": "s"}, [ParsedPrompt("a", cache_salt="s")]),
        ({"prompt": "a", "cache_salt": None, "multi_modal_data": None}, [ParsedPrompt("a")]),
        ({"prompt": "a", "multi_modal_data": {"image": PICTURE}}, [ParsedPrompt("a", images=[PICTURE])]),
        ({"prompt": "a", "multi_modal_data": {"image": [PICTURE] * 2}}, [ParsedPrompt("a", images=[PICTURE] * 2)]),
        ({"prompt": "a", "mm_processor_kwargs": {}, "multi_modal_uuids": None}, [ParsedPrompt("a")]),
    ],
)
def test_a_prompt_may_be_a_text_token_ids_or_a_dict(given, expected):
    assert parse_prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "prompts must be texts, lists of token ids, or dicts with `prompt`"),
        ({"promt": "a"}, "prompts: promt must be left out, because the keys of a prompt are prompt, prompt_token_ids"),
        ({"prompt": 5}, "prompts: prompt must be a text, got 5"),
        ({"prompt": "a", "cache_salt": 5}, "prompts: cache_salt must be a text, got 5"),
        ({"prompt_token_ids": "abc"}, "prompts must be texts, lists of token ids"),
        ({"prompt_token_ids": [1, 2.5]}, "token ids are whole numbers, got 2.5"),
        ({"prompt_embeds": [1.0]}, "prompts: prompt_embeds is not supported: use `prompt` or `prompt_token_ids`"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "coder_prompt is not supported: "),
        ({"prompt": "a", "mm_processor_kwargs": {"fps": 1}}, "prompts: mm_processor_kwargs is not supported: images"),
        ({"prompt": "a", "multi_modal_uuids": {"image": ["x"]}}, "prompts: multi_modal_uuids is not supported"),
        ({"prompt_token_ids": [1], "token_type_ids": [0]}, "prompts: token_type_ids is not supported: LLM.score"),
        ({"prompt": "a", "multi_modal_data": {"video": [PICTURE]}}, "multi_modal_data.video is not supported"),
        ({"prompt": "a", "multi_modal_data": {"image": "x.png"}}, "multi_modal_data.image must be a PIL.Image or"),
        ({"prompt": "a", "multi_modal_data": [PICTURE]}, 'multi_modal_data must be {"image": a PIL.Image or a list'),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": PICTURE}}, "multi_modal_data needs `prompt`, not"),
    ],
)
def test_any_other_dict_is_refused_by_the_name_of_its_key(given, error):
    with pytest.raises(RequestError, match=error.replace("{", r"\{")):
        parse_prompts([given, "and another"])
