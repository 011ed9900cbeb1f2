"""Structural tags in both of vLLM's forms, as llguidance matches them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from deployments.openai.completion_body import CompletionBody
from deployments.openai.foreign_fields import FOREIGN_FIELDS
from deployments.openai.structural_tag import structural_tag_grammar
from engine.errors import InvalidParameter, RequestError
from engine.grammars.compiler import source
from tests.fake_engine import EOS
from tests.models import make_tokenizer

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAG = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": NUMBER}, "end": "</f>"}
WORD = {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": "</f>"}
OLD = {"structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f="]}


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, WORD], **fields}


def separated(**fields: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [TAG, WORD], "separator": ", ", **fields}


def matches(body: dict[str, Any], text: str) -> bool:
    """Return whether the grammar that a request asks for accepts `text` as a complete output."""
    params = CompletionBody.model_validate({"prompt": "a", **body}).sampling_params({}).structured_outputs
    assert params is not None
    tokenizer = make_tokenizer()
    matcher = LLMatcher(LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[EOS]), source(params), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


A, B = '<f=a>{"n": 1}</f>', "<f=b>so < it</f>"


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (OLD, ["text", A, f"text {A} and {A}."], ["<f=a>{}</f>", "<f=c>", '<f=a>{"n": 1}']),
        ({"format": triggered()}, ["", f"a {A}{B} b"], ["<f=a>{}</f>"]),
        ({"format": triggered(at_least_one=True)}, [f"a {A}"], ["a"]),
        ({"format": triggered(stop_after_first=True)}, ["a", A], [A + B]),
        ({"format": separated()}, ["", f"{A}, {B}"], ["a", A + B]),
        ({"format": separated(at_least_one=True, stop_after_first=True)}, [A, B], ["", f"{A}, {B}"]),
        ({"format": {"type": "sequence", "elements": [TAG, {"type": "regex", "pattern": "a/b+"}]}}, [f"{A}a/bb"], [A]),
        ({"format": {"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}}, [A, "no"], ["", B]),
    ],
)
def test_parts_between_tags_follow_their_grammar(tag, good, bad):
    for body in (
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ):
        for text in good + bad:
            assert matches(body, text) == (text in good), text


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("{", "a structural tag in vLLM's format"),
        ({}, "KeyError"),
        ({"format": {"type": "tag", "begin": "a", "end": "b"}}, "content"),
        ({"format": {"type": "grammar"}}, "a format of type const_string"),
        ({"format": triggered(triggers=["<g"])}, "a trigger with which at least one tag begins"),
        ({"format": triggered(triggers=[])}, "a list of at least one"),
        ({"format": "any_text"}, "TypeError"),
    ],
)
def test_tag_that_makes_no_sense_is_refused(tag, message):
    with pytest.raises(InvalidParameter, match=message):
        structural_tag_grammar(tag, "structured_outputs.structural_tag", closed=True)


def test_deep_tag_is_refused():
    tag: dict[str, Any] = {"type": "any_text"}
    for _ in range(1000):
        tag = {"type": "sequence", "elements": [tag]}
    with pytest.raises(InvalidParameter, match="nested at most"):
        structural_tag_grammar({"format": tag}, "response_format", closed=True)


def test_only_one_form_is_taken():
    body = {"prompt": "a", "structured_outputs": {"structural_tag": OLD, "grammar": 'start: "a"'}}
    with pytest.raises(RequestError, match="exactly one form"):
        CompletionBody.model_validate(body).sampling_params({})


@pytest.mark.parametrize(
    ("between", "allowed"),
    [
        *((blanks, True) for blanks in ("", " ", "\n", "\n" + " " * 20, "\n\t\t")),
        *((blanks, False) for blanks in ("  ", "\n" + " " * 21, "\t", " \n", "\n\n", "\r\n")),
    ],
)
def test_as_many_blanks_may_stand_between_two_tokens_of_json_as_the_documentation_says(between, allowed):
    schema = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"], "additionalProperties": False}
    assert matches({"structured_outputs": {"json": schema}}, f'{{{between}"n":{between}1}}') == allowed
    reason = "between tokens of JSON the server allows one space, or a line break and up to 20 blanks"
    assert FOREIGN_FIELDS.ignored["guided_whitespace_pattern"] == reason
