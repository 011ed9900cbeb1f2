"""Arguments of vLLM's `LLM` methods: obeyed, ignored with a reason, or refused by name."""

from __future__ import annotations

import inspect

import pytest

from engine import LLM
from engine.errors import RequestError
from engine.offline.arguments import METHODS, TABLE, named

VLLM = {  # arguments of the methods of vllm.LLM: of its version 0.33, and of older ones that are still copied
    "generate": "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs "
    "prompt_token_ids guided_options_request prompt_adapter_request",
    "chat": "messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format "
    "add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs mm_processor_kwargs",
    "embed": "prompts pooling_params use_tqdm lora_request tokenization_kwargs truncate_prompt_tokens "
    "prompt_adapter_request",
    "classify": "prompts pooling_params use_tqdm lora_request tokenization_kwargs",
    "encode": "prompts pooling_params use_tqdm lora_request pooling_task tokenization_kwargs truncate_prompt_tokens",
    "score": "data_1 data_2 use_tqdm pooling_params lora_request tokenization_kwargs chat_template "
    "truncate_prompt_tokens prompt_adapter_request",
}
ARGUMENTS = [(method, name) for method, names in VLLM.items() for name in names.split()]


@pytest.mark.parametrize(("method", "name"), ARGUMENTS)
def test_every_argument_of_vllm_is_ours_or_in_the_table(method, name):
    ours = inspect.signature(getattr(LLM, method)).parameters
    rows = [row for row in TABLE if row.name == name and method in row.methods.split()]
    assert len(rows) == (name not in ours)


class Engine:
    @named
    def generate(self, prompts, *, use_tqdm=True):
        return prompts, use_tqdm


def test_what_a_method_has_reaches_it_and_what_asks_for_nothing_is_dropped():
    assert Engine().generate("a", use_tqdm=False) == ("a", False)
    assert Engine().generate(prompts="a", tokenization_kwargs=None, mm_processor_kwargs={}) == ("a", True)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tokenization_kwargs": {"truncation": True}}, "tokenization_kwargs of LLM.generate is not supported: use"),
        ({"prompt_token_ids": [[1]]}, 'prompt_token_ids of LLM.generate is not supported: use prompts={"prompt_token'),
        ({"progress": False}, "progress of LLM.generate is not supported: use use_tqdm"),
        ({"use_tdqm": False}, "LLM.generate has no argument 'use_tdqm'; it has prompts, use_tqdm"),
        ({"tools": []}, "LLM.generate has no argument 'tools'"),
    ],
)
def test_any_other_argument_is_refused_by_name(given, error):
    with pytest.raises(RequestError) as refused:
        Engine().generate("a", **given)
    assert str(refused.value).startswith(error) and refused.value.param in given


def test_an_argument_without_effect_on_answers_is_ignored_with_the_reason(caplog):
    class Chats:
        @named
        def chat(self, messages):
            return messages

    assert Chats().chat("hello", chat_template_content_format="auto") == "hello"
    assert not caplog.messages
    Chats().chat("hello", chat_template_content_format="openai")
    assert caplog.messages == [
        "chat_template_content_format of LLM.chat is ignored: templates get the form of content that they read"
    ]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_of_vllm_that_are_not_there_are_refused_by_name(name):
    with pytest.raises(RequestError, match=rf"LLM.{name} is not supported: \w"):
        getattr(object.__new__(LLM), name)


def test_any_other_name_is_no_attribute():
    assert not hasattr(object.__new__(LLM), "generte")
