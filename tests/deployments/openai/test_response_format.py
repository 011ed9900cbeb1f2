from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import ErrorInfo

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ROUTES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "completions": {"prompt": "hello", "max_tokens": 2},
}


def json_schema(type: str = "json_schema", **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": type, "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": None, "json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True, "field": "response_format"}),
        (json_schema(strict=True), {"json": SCHEMA, "field": "response_format.json_schema.schema"}),
        (json_schema(description="what it is for"), {"json": SCHEMA, "field": "response_format.json_schema.schema"}),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json": '{"type": "null"}'}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
            {"json": SCHEMA, "disable_additional_properties": False},
        ),
    ],
)
async def test_the_engine_is_told_what_form_the_answer_must_have(route, body, expected, api):
    response = await api.post(route, **ROUTES[route], **body)
    assert response.status_code == 200, response.text
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert api.engine.added[0].params.structured_outputs == wanted


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "a structural tag in vLLM's format"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required with the type"),
        (json_schema(type="json_object"), "response_format", "json_schema is required with the type"),
        (json_schema(schema=None), "response_format", "schema"),
        ({"response_format": "json"}, "response_format", "an object"),
        ({**json_schema(), "structured_outputs": {"regex": "a"}}, "structured_outputs", "cannot be combined"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one text"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "valid JSON"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "a structural tag"),
        ({"structured_outputs": {"grammar": "a" * 30_000}}, "structured_outputs.grammar", "at most 20000 characters"),
    ],
)  # fmt: skip
async def test_a_form_that_makes_no_sense_is_refused_before_an_engine_sees_it(route, body, param, message, api):
    response = await api.post(route, **ROUTES[route], **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert api.engine.added == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_that_cannot_be_compiled_is_a_bad_request_also_with_stream(stream, api):
    problem = InvalidParameter("structured_outputs.regex", "(", "a regular expression (unclosed group)")
    api.engine.refusal = ErrorInfo.of(problem)
    response = await api.post("completions", prompt="a", structured_outputs={"regex": "("}, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == "structured_outputs.regex"
    assert "unclosed group" in error["message"]
