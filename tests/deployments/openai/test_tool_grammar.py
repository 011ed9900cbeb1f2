"""Grammars as llguidance matches them, with texts that they must let pass and texts that they must not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from deployments.openai.call_grammar import Lark
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import NamedToolChoice, Tool
from deployments.openai.formats.chat_format import VisibleMarkers
from deployments.openai.formats.tool_grammar import ToolGrammar
from deployments.openai.parsers.reasoning.think import ReasoningTags
from engine.errors import InvalidParameter
from engine.grammars.compiler import source
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.deployments.openai.chat_models import MARKERS, QWEN, chat_tokenizer, hf_tokenizer
from tests.fake_engine import EOS

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
WORD = {"type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": ["word"]}
CONTENT = StructuredOutputsParams(
    json={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
)


def tools(*, strict: bool = False) -> list[Tool]:
    schemas = {"point": POINT, "look_up": WORD, "now": None}
    functions = [{"name": name, "parameters": schema, "strict": strict} for name, schema in schemas.items()]
    return [Tool.model_validate({"type": "function", "function": function}) for function in functions]


def named(name: str) -> NamedToolChoice:
    return NamedToolChoice.model_validate({"type": "function", "function": {"name": name}})


def grammar(markers: str = "tokens", **fields: Any) -> StructuredOutputsParams | None:
    tokens = VisibleMarkers(chat_tokenizer(QWEN, markers), MARKERS)
    body = ChatBody.model_construct(
        tools=fields.pop("tools", []),
        tool_choice=fields.pop("choice", None),
        parallel_tool_calls=fields.pop("parallel", True),
    )
    defaults = {
        "content": None,
        "tool_call_parser": "hermes",
        "tags": ReasoningTags(),
        "thinking": "never",
        "lark": Lark(MARKERS, tokens.ids.get),
    }
    return ToolGrammar(body=body, **{**defaults, **fields}).params()


@cache
def ll_tokenizer(markers: str) -> LLTokenizer:
    return LLTokenizer(hf_tokenizer(QWEN, markers).backend_tokenizer.to_str(), eos_token=[EOS])


def matches(params: StructuredOutputsParams | None, text: str, markers: str = "tokens") -> bool:
    """Return whether the grammar accepts `text` as a complete output."""
    assert params is not None
    matcher = LLMatcher(ll_tokenizer(markers), source(params), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = chat_tokenizer(QWEN, markers).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


POINT_CALL = '{"name": "point", "arguments": {"x": 1}}'
BAD_CALL = '{"name": "point", "arguments": {"x": "1"}}'
NOW_CALL = '{"name": "now", "arguments": {}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def test_nothing_is_enforced_where_nothing_was_asked_for():
    assert grammar() is None
    assert grammar(tools=tools(), choice="auto", thinking="begun") is None
    assert grammar(content=CONTENT) is CONTENT


def test_required_calls_are_an_array_of_calls_of_the_tools():
    params = grammar(tools=tools(), choice="required")
    assert matches(params, f"[{POINT_CALL}, {NOW_CALL}]")
    for bad in ("[]", "[{}]", f"[{BAD_CALL}]", POINT_CALL, "no", '[{"name": "other", "arguments": {}}]'):
        assert not matches(params, bad), bad


def test_one_call_at_most_unless_calls_may_be_parallel():
    params = grammar(tools=tools(), choice="required", parallel=False)
    assert matches(params, f"[{POINT_CALL}]")
    assert not matches(params, f"[{POINT_CALL}, {NOW_CALL}]")
    params = grammar(tools=tools(strict=True), parallel=False)
    assert matches(params, hermes(POINT_CALL))
    assert not matches(params, hermes(POINT_CALL, NOW_CALL))


def test_named_function_leaves_its_arguments_only():
    params = grammar(tools=tools(), choice=named("point"))
    assert matches(params, '{"x": 1}')
    assert not matches(params, '{"x": "1"}')
    assert not matches(params, '{"word": "a"}')


@pytest.mark.parametrize("markers", ["tokens", "special", "text"])
@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"content": CONTENT}, '{"ok": true}'),
        ({"tools": tools(), "choice": "required"}, f"[{POINT_CALL}]"),
        ({"tools": tools(), "choice": named("point")}, '{"x": 1}'),
        ({"content": StructuredOutputsParams(regex="a/b|c\\\\d\n")}, "a/b"),
        ({"content": StructuredOutputsParams(choice=['"yes"', "no"])}, '"yes"'),
        ({"content": StructuredOutputsParams(json_object=True)}, '{"a": {}}'),
    ],
)
def test_reasoning_may_come_before_an_answer_of_any_form(fields, answer, markers):
    maybe, begun = (grammar(markers, **fields, thinking=thinking) for thinking in ("maybe", "begun"))
    thoughts = 'so {"ok": maybe}\n[1'
    assert matches(maybe, answer, markers)
    assert matches(maybe, f"<think>\n{thoughts}\n</think>\n\n{answer}", markers)
    assert matches(begun, f"{thoughts}\n</think>\n\n{answer}", markers)
    assert not matches(maybe, f"{thoughts}</think>{answer}", markers)
    assert not matches(begun, answer, markers)
    assert not matches(begun, f"{thoughts}</think>bad", markers)


@pytest.mark.parametrize("markers", ["tokens", "special", "text"])
def test_strict_tools_hold_calls_to_their_schema_and_nothing_else(markers):
    params = grammar(markers, tools=tools(strict=True), choice="auto", thinking="maybe")
    for good in ("just text {", hermes(POINT_CALL), f"text {hermes(NOW_CALL, POINT_CALL)} text", "<think>a</think>b"):
        assert matches(params, good, markers), good
    for bad in (hermes(BAD_CALL), f"text {hermes(POINT_CALL, BAD_CALL)}", "<tool_call>no"):
        assert not matches(params, bad, markers), bad


def test_tools_that_are_not_strict_take_any_arguments_beside_one_that_is():
    mixed = [tools(strict=True)[0], tools()[1]]
    assert matches(grammar(tools=mixed), hermes('{"name": "look_up", "arguments": {"any": "thing"}}'))
    assert not matches(grammar(tools=mixed), hermes(BAD_CALL))


def test_strict_calls_of_llama_are_the_whole_answer():
    params = grammar(tools=tools(strict=True), tool_call_parser="llama3_json")
    good = POINT_CALL.replace("arguments", "parameters")
    assert matches(params, good)
    assert matches(params, f"{good}; {good}")
    assert matches(params, "text {")
    assert not matches(params, BAD_CALL.replace("arguments", "parameters"))


@pytest.mark.parametrize(("parser", "key"), [("hermes", "arguments"), ("llama3_json", "parameters")])
def test_answer_of_a_given_form_or_calls(parser, key):
    params = grammar(tools=tools(), content=CONTENT, tool_call_parser=parser)
    call = POINT_CALL.replace("arguments", key)
    assert matches(params, '{"ok": false}')
    assert matches(params, hermes(call, call) if parser == "hermes" else f"{call}; {call}")
    assert not matches(params, "text")


def test_grammar_of_the_users_own_cannot_be_combined():
    content = StructuredOutputsParams(grammar='start: "a"')
    assert grammar(content=content) is content
    with pytest.raises(InvalidParameter, match="grammar must be json, json_object, regex or choice"):
        grammar(content=content, thinking="maybe")


@pytest.mark.parametrize(("strict", "choice"), [(True, "auto"), (False, "required"), (False, named("f"))])
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "strin"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}, "missing"),
        ({"type": "object", "properties": {"a": {"not": {"minLength": 3}}}}, "not"),
        ({"type": "object", "properties": []}, "properties"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused_by_name(schema, reason, strict, choice):
    function = {"name": "f", "parameters": schema, "strict": strict}
    tool = Tool.model_validate({"type": "function", "function": function})
    with pytest.raises(InvalidParameter, match=reason) as raised:
        grammar(tools=[tool], choice=choice)
    assert raised.value.param == "tools[0].function.parameters"
