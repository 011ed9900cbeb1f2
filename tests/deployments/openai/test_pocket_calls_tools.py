"""Forced calls by the bundled model: the engine, the grammar and the parser together, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from deployments.openai.chat_body import ChatBody
from deployments.openai.formats.chat_format import ChatFormat, VisibleMarkers
from deployments.openai.formats.choice_parser import ChoiceParser
from deployments.openai.parsers.output_parser import CallArguments, CallStart
from engine import LLM, SamplingParams
from engine.model.checkpoint.resolve import resolve
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.text_stream import TextChunk

QUESTION = [{"role": "user", "content": "What is an ocean?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 20}, "limit": {"$ref": "#/$defs/limit"}},
    "required": ["word", "limit"],
    "additionalProperties": False,
    "$defs": {"limit": {"enum": [1, 2, 3]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pocket", num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    ],
)
def test_forced_call_has_the_arguments_that_its_schema_asks_for(llm, fields: dict[str, Any]):
    tokenizer = ChatTokenizer.from_folder(resolve("pocket"))
    chat_format = ChatFormat.of(tokenizer)
    body = ChatBody.model_validate({"messages": QUESTION, "tools": TOOLS, **fields})
    assert chat_format == ChatFormat("hermes", "none", shows_tools=True)
    tools = [tool.for_template() for tool in body.offered_tools]
    prompt = tokenizer.apply_chat_template(QUESTION, tools)
    tokens = VisibleMarkers(tokenizer, chat_format.markers)
    grammar = chat_format.structured_outputs(body, "never", None, tokens)
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=grammar)
    (output,) = llm.generate([prompt], params)[0].outputs
    assert output.finish_reason == "stop", output.text
    events = ChoiceParser(chat_format.output_format(body, "never", tokens)).add(
        TextChunk(output.text, [], [], None, None, finish_reason="stop")
    )
    assert events
    assert all(isinstance(event, CallStart | CallArguments) for event in events)
    for start, arguments in zip(events[::2], events[1::2], strict=True):
        jsonschema.validate(json.loads(arguments.text), PARAMETERS if start.name == "look_up" else {"maxProperties": 0})


def test_template_shows_tools_to_the_model_and_changes_nothing_without_them():
    tokenizer = ChatTokenizer.from_folder(resolve("pocket"))
    turns = [
        {"role": "system", "content": "Be short."},
        *QUESTION,
        {"role": "assistant", "content": "Water."},
        *QUESTION,
    ]
    assert tokenizer.render_chat_template(turns) == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\nWhat is an ocean?<|im_end|>\n"
        "<|im_start|>assistant\nWater.<|im_end|>\n"
        "<|im_start|>user\nWhat is an ocean?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "look_up" in tokenizer.render_chat_template(turns, TOOLS)
