from __future__ import annotations

import pytest
from llguidance import LLMatcher

from engine.text.grammar import source
from engine.text.json_schema import ANNOTATIONS, UUIDS, without_annotations
from engine.wire.structured_outputs import StructuredOutputsParams


def problem(schema: dict[str, object]) -> str:
    return LLMatcher.validate_grammar(source(StructuredOutputsParams(json=schema)), None)


@pytest.mark.parametrize("name", sorted(ANNOTATIONS | UUIDS))
def test_format_that_pydantic_writes_is_no_reason_to_refuse_a_schema(name):
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "format": name}, {"type": "null"}]}}}
    assert problem(schema) == ""


def test_format_that_nobody_knows_is_refused():
    assert "nonsense" in problem({"type": "string", "format": "nonsense"})


def test_only_formats_of_schemas_are_dropped():
    schema = {
        "properties": {"format": {"const": {"format": "path"}}, "default": {"type": "string", "format": "uuid4"}},
        "enum": [{"format": "path"}],
        "items": [{"format": "path"}, {"format": "date"}],
    }
    assert without_annotations(schema) == {
        "properties": {"format": {"const": {"format": "path"}}, "default": {"type": "string", "format": "uuid"}},
        "enum": [{"format": "path"}],
        "items": [{}, {"format": "date"}],
    }
