"""Calls in each family's own format, as llguidance matches them: what the parsers read, and nothing else."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from deployments.openai.call_grammar import Lark
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import NamedToolChoice, Tool
from deployments.openai.formats.chat_format import ChatFormat, VisibleMarkers
from deployments.openai.formats.families import CALL_FORMATS
from deployments.openai.formats.tool_grammar import ToolGrammar
from engine.errors import InvalidParameter
from engine.grammars.compiler import source
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.deployments.openai.parsers.families import ARGS, FAMILIES, TOOLS, Family
from tests.fake_engine import EOS
from tests.models import make_tokenizer

SCHEMAS = {**TOOLS, "get_weather": {**TOOLS["get_weather"], "required": ["city"]}}
CONTENT = StructuredOutputsParams(choice=["yes", "no"])
NATIVE = [family for family in FAMILIES if CALL_FORMATS[family.parser].syntax or family.parser == "openai"]
by_family = pytest.mark.parametrize("family", NATIVE, ids=lambda family: family.parser)
kinds = pytest.mark.parametrize("kind", ["special", "text"])
V11 = "[ARGS]"  # in examples of Mistral's newer format, for which this has to be a token


@pytest.fixture(autouse=True)
def _skip_the_other_format_of_mistral(request: pytest.FixtureRequest) -> None:
    family, kind = (request.node.callspec.params.get(name) for name in ("family", "kind"))
    if family is not None and family.parser == "mistral" and (V11 in family.text) != (kind == "special"):
        pytest.skip("this tokenizer belongs to the other format")


@cache
def tokenizers(parser: str, kind: str) -> tuple[VisibleMarkers, ChatTokenizer, LLTokenizer]:
    """kind: the markers are `special` tokens, or plain `text`."""
    markers = markers_of(parser)
    tokenizer = make_tokenizer()
    if kind == "special":
        tokenizer.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers], True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        ours = ChatTokenizer.from_folder(Path(folder))
    return VisibleMarkers(ours, markers), ours, LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[EOS])


def markers_of(parser: str) -> list[str]:
    return ChatFormat(parser, "openai_gptoss" if parser == "openai" else "none", shows_tools=True).markers


def grammar(parser: str, kind: str, *, strict: bool = True, **fields: Any) -> StructuredOutputsParams | None:
    tokens, _, _ = tokenizers(parser, kind)
    functions = fields.pop("functions", [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()])
    body = ChatBody.model_construct(
        tools=[Tool.model_validate({"type": "function", "function": {**f, "strict": strict}}) for f in functions],
        tool_choice=fields.pop("choice", None),
    )
    defaults = {"content": None, "tags": None, "thinking": "never", "lark": Lark(markers_of(parser), tokens.ids.get)}
    return ToolGrammar(body=body, tool_call_parser=parser, **{**defaults, **fields}).params()


def matches(params: StructuredOutputsParams | None, parser: str, kind: str, text: str) -> bool:
    """Return whether the grammar accepts `text` as a complete output."""
    assert params is not None
    _, tokenizer, ll_tokenizer = tokenizers(parser, kind)
    matcher = LLMatcher(ll_tokenizer, source(params), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def calls_of(family: Family) -> str:
    """Return the example without reasoning and content, as a chat template writes it."""
    text = family.text.replace("now{}", "now[ARGS]{}").replace("I look.", "").replace("Hm.", "").lstrip()
    for tag in ("[THINK][/THINK]", "<think></think>", "<think>", "<seed:think></seed:think>"):
        text = text.removeprefix(tag).lstrip()
    return text.removeprefix("Here is my thought process:  Here is my response: ")


@kinds
@by_family
def test_published_calls_are_what_a_forced_or_strict_output_is_made_of(family: Family, kind: str):
    calls, parser = calls_of(family), family.parser
    if parser == "openai":  # one call ends the turn
        calls = calls[: calls.index("<|call|>")]
    wrong = calls.replace("2", "true")
    assert wrong != calls
    auto = grammar(parser, kind)
    assert matches(auto, parser, kind, calls)
    assert not matches(auto, parser, kind, wrong)
    if parser != "openai":
        assert matches(auto, parser, kind, "just text")
        assert matches(auto, parser, kind, f"text{calls}")
    if CALL_FORMATS[parser].forced_natively(tokenizers(parser, kind)[0].ids.get):
        forced = grammar(parser, kind, strict=False, choice="required")
        assert matches(forced, parser, kind, calls)
        for bad in (wrong, "", "just text", f"text{calls}", calls.replace("get_weather", "other")):
            assert not matches(forced, parser, kind, bad), bad


@kinds
@by_family
def test_answer_of_a_given_form_or_calls(family: Family, kind: str):
    params = grammar(family.parser, kind, content=CONTENT, strict=False)
    if family.parser != "openai":
        assert matches(params, family.parser, kind, "yes")
        assert matches(params, family.parser, kind, calls_of(family))
    else:
        analysis = "<|channel|>analysis<|message|>so yes<|end|><|start|>assistant"
        assert matches(params, "openai", kind, f"{analysis}<|channel|>final<|message|>yes")
        assert not matches(params, "openai", kind, f"{analysis}<|channel|>final<|message|>maybe")
    assert not matches(params, family.parser, kind, "maybe")


@kinds
@by_family
def test_named_function_is_the_only_one_and_is_called_once(family: Family, kind: str):
    parser, ids = family.parser, tokenizers(family.parser, kind)[0].ids
    if parser == "openai" or not CALL_FORMATS[parser].forced_natively(ids.get):
        pytest.skip("the grammar knows no other")
    choice = NamedToolChoice.model_validate({"type": "function", "function": {"name": "now"}})
    params = grammar(parser, kind, choice=choice, strict=False)
    syntax = CALL_FORMATS[parser].syntax_for(ids.get)
    assert syntax is not None
    call = syntax.call.format(name="now", arguments="{}", parameters="", number=0)
    assert matches(params, parser, kind, f"{syntax.begin}{call}{syntax.end}")
    for bad in (f"{syntax.begin}{call}{syntax.between}{call}{syntax.end}", calls_of(family), "text"):
        assert not matches(params, parser, kind, bad)


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45", "deepseek_v32"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "<b> \n"], []),
        ({"enum": ["a", "b"]}, ["a", "b"], ["", "c", "ab"]),
        ({"type": ["integer", "boolean"]}, ["1", "true"], ["a", '"1"']),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, ["[1, 2]"], ['["a"]']),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "a"], []),
    ],
)
def test_values_between_tags_follow_their_schema(parser, schema, good, bad):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"n": {"type": "integer"}}}
    params = grammar(parser, "text", functions=[{"name": "f", "parameters": parameters}], choice="required")
    syntax = CALL_FORMATS[parser].syntax
    assert syntax is not None
    before = syntax.parameter.format(key="a", is_text=str("string" in str(schema) or "enum" in schema).lower())
    for value in good + bad:
        arguments = f"{before}{value}{syntax.value_end}"
        text = syntax.begin + syntax.call.format(name="f", parameters=arguments) + syntax.end
        assert matches(params, parser, "text", text) == (value in good), value


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a+"}}}, "without pattern"),
        ({"properties": {}, "anyOf": [{"required": ["a"]}]}, "plain properties"),
    ],
)
def test_strict_schema_that_cannot_be_enforced_between_tags_is_refused_by_name(parameters, reason):
    functions = [{"name": "f", "parameters": {"type": "object", **parameters}}]
    with pytest.raises(InvalidParameter, match=reason) as raised:
        grammar("qwen3_coder", "text", functions=functions)
    assert raised.value.param is not None
    assert raised.value.param.startswith("tools[0].function.parameters")
    assert grammar("qwen3_coder", "text", functions=functions, choice="required", strict=False) is not None


REFERENCES = {
    "#/$defs/A": {},
    "#/$defs/A%20b": {"$id": "https://example.org/tool"},
    "#name": {},
    "#/$defs/Pair[int]": {},
    "#/$defs/Größe": {},
    "#/properties/other": {},
}


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("choice", [None, "required", "named"])
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "deepseek_v3"])
def test_references_of_a_tool_lead_to_its_own_schemas_also_beside_other_tools(parser, choice, reference):
    number = {"type": "integer"}
    defs = {"A": number, "A b": number, "Pair[int]": number, "Größe": number, "B": {"$anchor": "name", **number}}
    schema = {"type": "object", "properties": {"v": {"$ref": reference}, "other": number}, "required": ["v"]}
    other = {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}}
    functions = [
        {"name": "g", "parameters": {**REFERENCES[reference], **other}},
        {"name": "f", "parameters": {**REFERENCES[reference], **schema, "$defs": defs}},
    ]
    named = NamedToolChoice.model_validate({"type": "function", "function": {"name": "f"}})
    params = grammar(parser, "text", functions=functions, choice=named if choice == "named" else choice)
    for value, fits in (("7", True), ('"x"', False)):
        text = json_call(parser, choice, f'{{"v": {value}}}')
        if parser == "qwen3_coder":
            text = f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert matches(params, parser, "text", text) == fits


def json_call(parser: str, choice: str | None, arguments: str) -> str:
    if parser == "deepseek_v3":
        call = CALL_FORMATS[parser].syntax
        assert call is not None
        return call.begin + call.call.format(name="f", arguments=arguments) + call.end
    whole = f'{{"name": "f", "arguments": {arguments}}}'
    forced = {"required": f"[{whole}]", "named": arguments}
    return forced[choice] if choice else f"<tool_call>\n{whole}\n</tool_call>"


UNSUPPORTED = {"type": "object", "properties": {"q": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("strict", [False, True])
def test_tool_that_cannot_be_enforced_is_no_reason_to_refuse_the_choice_of_another_one(parser, strict):
    functions = [{"name": "bad", "parameters": UNSUPPORTED}, {"name": "f", "parameters": {"type": "object"}}]
    named = {
        name: NamedToolChoice.model_validate({"type": "function", "function": {"name": name}}) for name in ("bad", "f")
    }
    assert grammar(parser, "text", strict=strict, functions=functions, choice=named["f"]) is not None
    for choice in (named["bad"], "required"):
        with pytest.raises(InvalidParameter, match="uniqueItems at #/properties/q cannot be enforced") as raised:
            grammar(parser, "text", strict=strict, functions=functions, choice=choice)
        assert raised.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"description": "x", "title": "x", "examples": ["x"], "default": "x"},
        {"format": "path"},
        {"format": "password", "writeOnly": True, "readOnly": True},
        {"deprecated": True, "example": "x", "$comment": "x", "x-order": 1, "nullable": False},
        {"minLength": 0, "pattern": None},
        {"contentMediaType": "text/html", "contentEncoding": "base64"},
        {"minimum": 3, "items": {"type": "integer"}},
        {"allOf": [{}], "not": {"not": {}}},
    ],
)
def test_keywords_that_assert_nothing_of_a_text_are_no_reason_to_refuse_a_strict_tool(more):
    for schema in ({"type": "string", **more}, {"anyOf": [{"type": "string", **more}, {"type": "null"}], **more}):
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        params = grammar("qwen3_coder", "text", functions=[{"name": "f", "parameters": parameters}])
        call = "<tool_call>\n<function=f>\n<parameter=a>\nany text\n</parameter>\n</function>\n</tool_call>"
        assert matches(params, "qwen3_coder", "text", call)


@pytest.mark.parametrize("parser", ["qwen3_coder"])
def test_arguments_between_tags_whose_schema_is_no_plain_object_are_free_unless_they_are_strict(parser):
    parameters = {
        "type": "object",
        "allOf": [{"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"properties": {"b": {}}}],
    }
    functions = [{"name": "f", "parameters": parameters}]
    params = grammar(parser, "text", strict=False, functions=functions, choice="required")
    call = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    assert matches(params, parser, "text", call)
    with pytest.raises(InvalidParameter, match="plain properties"):
        grammar(parser, "text", functions=functions)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("choice", [None, "required"])
def test_arguments_have_no_further_properties_unless_the_model_is_configured_so(closed, choice):
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    lark = Lark(markers_of("hermes"), tokenizers("hermes", "text")[0].ids.get, closed)
    params = grammar("hermes", "text", functions=[{"name": "f", "parameters": parameters}], choice=choice, lark=lark)
    assert matches(params, "hermes", "text", json_call("hermes", choice, '{"a": "x"}'))
    assert matches(params, "hermes", "text", json_call("hermes", choice, '{"a": "x", "b": 1}')) != closed


@pytest.mark.parametrize("parser", ["gemma4", "pythonic"])
def test_calls_that_no_grammar_describes_cannot_be_strict_and_forced_ones_are_json(parser):
    with pytest.raises(InvalidParameter, match=f"calls in the format {parser} cannot be enforced"):
        grammar(parser, "text")
    forced = grammar(parser, "text", choice="required", strict=False)
    assert matches(forced, parser, "text", f'[{{"name": "get_weather", "arguments": {ARGS}}}]')
