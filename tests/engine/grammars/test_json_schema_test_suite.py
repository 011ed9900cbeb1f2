"""All keywords of two drafts, by JSON Schema's own tests: a schema is refused with the reason, or enforced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.engine.grammars.matching import schema_matcher, takes

SUITE = json.loads(Path(__file__).with_name("json_schema_test_suite.json").read_text(encoding="utf-8"))
FILES = sorted({(draft, file) for draft, file, *_ in SUITE["cases"]})
BY_DESIGN = {  # files of which some values are valid and not taken
    "format": "formats that llguidance knows are enforced, though they need not be",
    "vocabulary": "dialects other than the drafts' are read as draft 2020-12",
}
BY_LLGUIDANCE = ("multipleOf", "patternProperty", "oneOf")  # that its reasons name
REFUSED_IF_CLOSED = {  # and enforced if open, by llguidance's limits
    "A $dynamicRef that initially resolves to a schema without a matching $dynamicAnchor behaves like a normal $ref "
    "to $anchor",
}


def cases(draft: str, file: str) -> list[tuple[str, dict[str, Any], list[Any], list[Any]]]:
    found = [rest for d, f, *rest in SUITE["cases"] if (d, f) == (draft, file)]
    whole = {True: {}, False: {"not": {}}}
    return [
        (name, whole[schema] if isinstance(schema, bool) else schema, valid, invalid)
        for name, schema, valid, invalid in found
    ]


def matcher_or_reason(schema: dict[str, Any], *, closed: bool = False) -> tuple[LLMatcher | None, str]:
    try:
        return schema_matcher(schema, closed=closed), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize(("draft", "file"), FILES, ids=str)
def test_schema_is_refused_by_name_or_takes_all_valid_values_and_no_invalid_one(draft, file):
    for name, schema, valid, invalid in cases(draft, file):
        matcher, reason = matcher_or_reason(schema)
        if matcher is None:
            named = reason.split()[0] in json.dumps(schema) or any(word in reason for word in BY_LLGUIDANCE)
            assert named or (reason == "no value is valid" and not valid), f"{name}: {reason}"
            continue
        assert not [value for value in invalid if takes(matcher, value)], name
        if file not in BY_DESIGN:
            assert not [value for value in valid if not takes(matcher, value)], name


@pytest.mark.parametrize(("draft", "file"), FILES, ids=str)
def test_closed_schema_takes_no_invalid_value_and_is_refused_only_if_the_open_one_is(draft, file):
    for name, schema, _, invalid in cases(draft, file):
        matcher, reason = matcher_or_reason(schema, closed=True)
        if matcher is None:
            assert name in REFUSED_IF_CLOSED or matcher_or_reason(schema)[0] is None, f"{name}: {reason}"
            continue
        assert not [value for value in invalid if takes(matcher, value)], name


def test_most_schemas_are_enforced():
    found = [matcher_or_reason(schema) for draft, file in FILES for _, schema, *_ in cases(draft, file)]
    refused = [reason for matcher, reason in found if matcher is None]
    assert len(found) == 640 and len(refused) <= 154, "\n".join(refused)
