from __future__ import annotations

import pytest

from deployments.openai.chat_format import ChatFormat, VisibleMarkers
from deployments.openai.request_bodies import ChatBody
from tests.deployments.openai.chat_models import DEEPSEEK, LLAMA, MARKERS, QWEN, chat_tokenizer
from tests.models import CHAT_TEMPLATE

HERMES_WITHOUT_REASONING = QWEN.replace("</think>", "").replace("<think>", "")
QWEN_CODER = QWEN.replace('{"name": "', "<function=")  # the same tag, but XML inside
GRANITE = LLAMA.replace('{"name": "\' + call.name + \'", "parameters": \'', "<|tool_call|>' + call.name")
REFUSES = "{{ raise_exception('no') }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, ChatFormat("hermes", "think", shows_tools=True)),
        (HERMES_WITHOUT_REASONING, ChatFormat("hermes", "none", shows_tools=True)),
        (QWEN_CODER, ChatFormat("none", "think", shows_tools=True)),
        (LLAMA, ChatFormat("llama3_json", "none", shows_tools=True)),
        (GRANITE, ChatFormat("none", "none", shows_tools=True)),
        (DEEPSEEK, ChatFormat("none", "think", shows_tools=False)),
        (CHAT_TEMPLATE, ChatFormat("none", "none", shows_tools=False)),
        (REFUSES, ChatFormat("none", "none", shows_tools=False)),
    ],
)
def test_format_is_taken_from_what_the_chat_template_writes(template, expected):
    assert ChatFormat.of(chat_tokenizer(template)) == expected


@pytest.mark.parametrize("name", ["think", "qwen3", "deepseek_r1"])
def test_configuration_goes_before_the_chat_template(name):
    assert ChatFormat.of(chat_tokenizer(QWEN), "none", "none") == ChatFormat("none", "none", shows_tools=True)
    assert ChatFormat.of(chat_tokenizer(LLAMA), "hermes", name) == ChatFormat("hermes", name, shows_tools=True)


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (QWEN, {}, "maybe"),
        (QWEN, {"chat_template_kwargs": {"enable_thinking": False}}, "never"),
        (DEEPSEEK, {}, "begun"),
        (LLAMA, {}, "never"),
        (QWEN, {"add_generation_prompt": False, "continue_final_message": True}, "never"),
    ],
)
def test_prompt_tells_whether_reasoning_comes_next(template, fields, expected):
    tokenizer = chat_tokenizer(template)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "<think>"}], **fields})
    if body.continue_final_message:
        body.messages[0].content = "<think>a</think>b"
    prompt = tokenizer.render_chat_template(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **body.chat_template_kwargs,
    )
    assert ChatFormat.of(tokenizer).thinking(body, prompt) == expected


def test_answer_that_is_continued_inside_of_its_reasoning_goes_on_reasoning():
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "content": "<think>\na"}], **fields})
    assert ChatFormat.of(chat_tokenizer(QWEN)).thinking(body, "<|im_start|>assistant\n<think>\na") == "begun"


@pytest.mark.parametrize(("kind", "num_tokens"), [("tokens", 4), ("special", 4), ("text", 0)])
def test_markers_are_text_whatever_the_tokenizer_calls_them(kind, num_tokens):
    tokenizer = chat_tokenizer(QWEN, kind)
    tokens = VisibleMarkers(tokenizer, MARKERS)
    assert len(tokens.ids) == num_tokens
    for marker in [*MARKERS, "<|im_end|>"]:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        assert b"".join(map(tokens.token_bytes, ids)).decode() == marker
        assert any(map(tokens.is_special, ids)) == (marker == "<|im_end|>")
