"""What keywords mean for answers, beyond JSON Schema's own tests."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammars import json_schema
from engine.grammars.conversion import FORMATS, HANDLERS, UUIDS
from engine.grammars.json_schema import enforceable
from engine.grammars.references import SchemaError
from engine.grammars.value_types import CONCERNS
from tests.engine.grammars.matching import schema_matcher, takes, takes_text

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "integer"}
A: dict[str, Any] = {"properties": {"a": TEXT}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": NUMBER}, "required": ["b"]}
SHAPES = {"A": {"type": "object", **A}, "B": {"type": "object", **B}}


def same(schema: dict[str, Any], plain: dict[str, Any]) -> bool:
    return enforceable(schema, closed=True) == enforceable(plain, closed=True)


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (
            {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
            {"type": "object", "additionalProperties": NUMBER},
        ),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/Key"}, "$defs": {"Key": TEXT}}, {"type": "object"}),
        ({"type": "object", "propertyNames": True}, {"type": "object"}),
        ({"type": "object", "propertyNames": {"anyOf": [TEXT, NUMBER]}}, {"type": "object"}),
        ({"type": "object", "propertyNames": {"minimum": 3}}, {"type": "object"}),
        ({"type": "object", "propertyNames": {"minLength": 0}}, {"type": "object"}),
        ({"type": "array", "items": NUMBER, "uniqueItems": False}, {"type": "array", "items": NUMBER}),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, {"type": "array", "maxItems": 1}),
        ({"type": "string", "uniqueItems": True, "contains": NUMBER}, TEXT),
        ({"enum": ["a", "b"], "uniqueItems": True}, {"enum": ["a", "b"]}),
        ({"anyOf": [{"not": {}}, NUMBER]}, NUMBER),
        ({"anyOf": [False, {"allOf": [NUMBER, {}]}]}, NUMBER),
        ({"oneOf": [{"not": True}, NUMBER]}, NUMBER),
        ({"type": "integer", "not": {"type": "string"}}, NUMBER),
        ({"type": "integer", "not": {"not": {}}}, NUMBER),
        ({"type": "integer", "not": False}, NUMBER),
        (
            {"type": "object", **A, "additionalProperties": {"not": {}}},
            {"type": "object", **A, "additionalProperties": False},
        ),
        ({"type": "object", "additionalProperties": {}}, {"type": "object"}),
        ({"type": "object", "unevaluatedProperties": True}, {"type": "object"}),
        ({"type": "array", "unevaluatedItems": True}, {"type": "array"}),
        ({"type": "array", "items": NUMBER, "unevaluatedItems": False}, {"type": "array", "items": NUMBER}),
        ({"type": "object", "dependentRequired": {}}, {"type": "object"}),
        ({"type": "object", "dependentRequired": {"a": []}}, {"type": "object"}),
        ({"type": "object", "dependentSchemas": {"a": True}}, {"type": "object"}),
        ({"type": "object", "dependencies": {"a": [], "b": {}}}, {"type": "object"}),
        ({"type": "object", "patternProperties": {}}, {"type": "object"}),
        ({"type": "object", "required": [], "minProperties": 0}, {"type": "object", "required": []}),
        ({"type": "array", "minContains": 2, "maxContains": 3}, {"type": "array"}),
        ({"type": "array", "contains": TEXT, "minContains": 0}, {"type": "array"}),
        ({"type": "object", "then": {"required": ["x"]}, "else": False}, {"type": "object"}),
        ({"type": "object", "if": {"required": ["x"]}}, {"type": "object"}),
        ({"type": "object", "if": True, "then": {}}, {"type": "object"}),
        ({"type": "string", "maxLength": 10.0, "minLength": 0.0}, {"type": "string", "maxLength": 10}),
        ({"type": "array", "maxItems": 3.0}, {"type": "array", "maxItems": 3}),
        ({"type": "string", "maxLength": 2**53 - 1}, TEXT),
        ({"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}, {"type": "number"}),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": False}, {"type": "integer", "minimum": 1}),
        ({"type": "integer", "format": "int64", "minLength": 3}, NUMBER),
        ({"type": "string", "format": None, "minLength": None, "title": None}, TEXT),
        ({"type": "string", "x-order": 1, "deprecated": True, "$comment": "x", "example": 1, "nullable": False}, TEXT),
        ({"type": "string", "contentMediaType": "text/html", "contentEncoding": "base64", "contentSchema": {}}, TEXT),
        ({"$schema": "http://json-schema.org/schema#", **NUMBER}, NUMBER),
        ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", **NUMBER}, NUMBER),
        ({"$id": "https://example.org/x", "$vocabulary": {"https://example.org/v": True}, **NUMBER}, NUMBER),
        ({"x-guidance": {"lenient": True}, "type": "integer"}, NUMBER),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "if": A, "then": B, "contains": A, **NUMBER}, NUMBER),
        ({"allOf": [NUMBER], "description": "pydantic 1 writes references so"}, NUMBER),
        *(
            ({"type": "string", "format": name}, TEXT)
            for name in (
                "ulid",
                "cuid",
                "jwt",
                "e164",
                "url",
                "name-email",
                "uri-reference",
                "iri",
                "idn-email",
                "json-pointer",
                "order-number",
                "path",
                "password",
                "binary",
                "regex",
                "unknown",
            )
        ),
        *(({"type": "string", "format": name}, {"type": "string", "format": "uuid"}) for name in sorted(UUIDS)),
    ],
    ids=json.dumps,
)
def test_keyword_that_asserts_nothing_changes_nothing(schema, plain):
    assert same(schema, plain)
    root = {key: schema[key] for key in ("$defs", "$schema") if key in schema}
    nested = ({"type": "object", "properties": {"v": inner}, **root} for inner in (schema, plain))
    assert same(*nested)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_format_that_is_said_to_be_enforced_is(name):
    matcher = schema_matcher({"type": "string", "format": name})
    assert not takes(matcher, "§ nothing of the kind §")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": NUMBER, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": NUMBER}, "contains"),
        ({"type": "object", "if": A, "then": B}, "if"),
        ({"not": {"type": "string", "minLength": 3}}, "not"),
        ({"type": "object", "propertyNames": {"format": "email"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {name: ["x"] for name in "abcdef"}}, "dependentRequired"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$ref": "#missing"}, "$ref"),
        ({"$ref": "#"}, "# refers to itself"),
        ({"$ref": 7}, "#/$ref"),
        ({"anyOf": [A, B], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "text"}, "#/type must be one or several of null, boolean"),
        ({"properties": []}, "#/properties"),
        ({"properties": {"a": 7}}, "#/properties/a must be a JSON schema"),
        ({"properties": {"a": {"required": "b"}}}, "#/properties/a/required"),
        ({"anyOf": {"a": 1}}, "#/anyOf/a"),
        ({"anyOf": 7}, "#/anyOf"),
        ({"enum": 7}, "#/enum"),
        ({"type": "string", "maxLength": 1.5}, "#/maxLength must be a whole number"),
        ({"type": "string", "maxLength": -1}, "#/maxLength"),
        ({"type": "string", "maxLength": True}, "#/maxLength"),
        ({"$id": 7}, "$id"),
        ({"properties": {"a": {"$id": 7}}}, "$id"),
        ({"not": {}}, "no value is valid"),
        ({"allOf": [NUMBER, False]}, "no value is valid"),
        ({"enum": []}, "no value is valid"),
    ],
    ids=json.dumps,
)
def test_keyword_that_cannot_be_enforced_is_refused_by_name_and_place(schema, keyword):
    with pytest.raises(SchemaError) as caught:
        enforceable(schema, closed=False)
    assert str(caught.value).startswith(keyword)


X, Y = {"a": "x"}, {"b": 1}
BOTH = {**X, **Y}
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({**OBJECT, "properties": {"a": TEXT}}, [{}, X], [{"c": 1}, {**X, "c": 1}]),
        ({**OBJECT, "properties": {}}, [{}], [X]),
        (OBJECT, [{}, X, {"c": {"d": [1]}}], []),
        ({**OBJECT, "properties": {"a": TEXT}, "additionalProperties": True}, [X, {**X, "c": 1}], [{"a": 1}]),
        ({**OBJECT, "properties": {"a": TEXT}, "additionalProperties": NUMBER}, [BOTH], [{**X, "b": "x"}]),
        ({**OBJECT, "properties": {"a": TEXT}, "unevaluatedProperties": True}, [X, {**X, "c": 1}], [{"a": 1}]),
        ({**OBJECT, "properties": {"a": TEXT}, "unevaluatedProperties": NUMBER}, [BOTH], [{**X, "b": "x"}]),
        (
            {**OBJECT, "properties": {"a": TEXT}, "patternProperties": {"^x-": NUMBER}},
            [{**X, "x-y": 1}],
            [{**X, "y": 1}],
        ),
        ({**OBJECT, "patternProperties": {"^x-": NUMBER}}, [{"x-y": 1}], [{"y": 1}]),
        ({**OBJECT, "patternProperties": {"^x": NUMBER, "^y": TEXT}}, [{"x": 1, "y": "x"}], [{"z": 1}]),
        ({**OBJECT, "patternProperties": {"f.*": True, "b.*": {}}}, [{"foobar": 1}, {"z": 1}], []),
        ({**OBJECT, "properties": {"a": TEXT}, "required": ["b"]}, [BOTH, Y], [X, {**BOTH, "c": 1}]),
        ({**OBJECT, "properties": {"in": SHAPES["A"]}}, [{"in": X}], [{"in": BOTH}]),
        ({"type": "array", "items": SHAPES["A"]}, [[X, X]], [[BOTH]]),
        ({"type": ["object", "null"], "properties": {"a": TEXT}}, [None, X], [{"c": 1}, 1]),
        ({"properties": {"a": TEXT}}, [X, 1, None], [{"c": 1}]),
        ({**OBJECT, **A, "minProperties": 2}, [{**X, "c": 1}], [X]),
        (
            {
                **OBJECT,
                "properties": {"a": TEXT, "b": NUMBER},
                "required": ["a"],
                "minProperties": 1,
                "maxProperties": 2,
            },
            [X, BOTH],
            [{}, Y],
        ),
        ({**OBJECT, "properties": {"next": {"$ref": "#/"}}}, [{"next": {"next": {}}}], [{"next": {"c": 1}}]),
        ({**OBJECT, "propertyNames": {"type": "integer"}}, [{}], [X]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(10**18), 10**18], [10**19]),
        ({"type": "number", "minimum": -3.4028234663852886e38, "exclusiveMaximum": 1e30}, [0.5], [10**31]),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        # several schemas for one value
        ({"allOf": [A, B]}, [BOTH], [X, Y, {**BOTH, "c": 1}]),
        ({**OBJECT, "allOf": [A], "properties": {"b": NUMBER}}, [X, BOTH], [{**X, "c": 1}]),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": SHAPES}, [BOTH], [X, {**BOTH, "c": 1}]),
        ({"$ref": "#/$defs/A", **B, "$defs": SHAPES}, [BOTH], [X, {**BOTH, "c": 1}]),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": SHAPES}, [X], [BOTH]),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, [{**BOTH, "c": 1}], [Y]),
        ({"anyOf": [A, B]}, [X, Y], [BOTH, {**X, "c": 1}]),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": SHAPES}, [X, None], [BOTH]),
        ({"anyOf": [A, B], "properties": {"c": TEXT}}, [X, {"c": "x", **Y}], [BOTH, {"d": 1, **X}]),
        ({"anyOf": [A, {**B, "additionalProperties": True}]}, [X, BOTH, {**Y, "c": 1}], [{**X, "c": 1}]),
        (
            {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {**A["properties"], **B["properties"]}},
            [X, Y, BOTH],
            [{}, {**X, "c": 1}],
        ),
        ({"allOf": [{"anyOf": [A, B]}, {"properties": {"c": TEXT}}]}, [X, {**Y, "c": "x"}], [BOTH, {**X, "d": 1}]),
        (
            {"allOf": [{"anyOf": [A, B]}, {"anyOf": [{"properties": {"c": TEXT}}, {"properties": {"d": TEXT}}]}]},
            [{**X, "c": "x"}, {**Y, "d": "x"}],
            [{**X, "c": "x", "d": "x"}, BOTH],
        ),
        ({"anyOf": [{"allOf": [A, B]}, {"type": "null"}]}, [BOTH, None], [X, {**BOTH, "c": 1}]),
        ({"oneOf": [SHAPES["A"], SHAPES["B"]]}, [X, Y], [BOTH]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
                "discriminator": {"propertyName": "k"},
                "$defs": {
                    "A": {**OBJECT, "properties": {"k": {"const": "a"}, "a": TEXT}, "required": ["k"]},
                    "B": {**OBJECT, "properties": {"k": {"const": "b"}, "b": NUMBER}, "required": ["k"]},
                },
            },
            [{"k": "a", **X}, {"k": "b", **Y}],
            [{"k": "a", **Y}, {"k": "a", **BOTH}],
        ),
        (
            {**OBJECT, "properties": {"a": TEXT, "next": {"$ref": "#"}}},
            [X, {"a": "x", "next": X}],
            [{"next": {"c": 1}}],
        ),
        (
            {
                "$ref": "#/$defs/Node",
                "$defs": {
                    "Node": {**OBJECT, "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}}
                },
            },
            [{"kids": [{"kids": []}]}],
            [{"kids": [{"c": 1}]}],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}],
                "$defs": SHAPES,
            },
            [{"a": "x", "kids": [X]}],
            [{"a": "x", "kids": [{"c": 1}]}, {**X, "c": 1}],
        ),
        ({**OBJECT, "properties": {"a": TEXT}, "dependentSchemas": {"a": B}}, [{}, BOTH], [X, {**BOTH, "c": 1}]),
        (
            {**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER},
            [{"a": 1, "b": 2}, Y],
            [X, {"c": 1}],
        ),
        ({**OBJECT, "propertyNames": {"pattern": "^x"}, "additionalProperties": NUMBER}, [{"xy": 1}], [Y]),
        ({**OBJECT, "propertyNames": {"maxLength": 2}}, [{"xy": 1}], [{"xyz": 1}]),
        ({"type": "array", "contains": {}}, [[1]], [[]]),
        ({"type": "array", "contains": True, "minContains": 2, "maxContains": 3}, [[1, 2]], [[1], [1, 2, 3, 4]]),
    ],
    ids=lambda value: json.dumps(value)[:80],
)
def test_object_with_listed_properties_has_no_others_unless_its_schema_speaks_of_them(schema, taken, refused):
    matcher = schema_matcher(schema, closed=True)
    assert [value for value in taken if not takes(matcher, value)] == []
    assert [value for value in refused if takes(matcher, value)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "properties": {"a": TEXT}},
        {"allOf": [A, {"properties": {"b": NUMBER}}]},
        {"anyOf": [A, A]},
        {"$ref": "#/$defs/A", "$defs": SHAPES},
    ],
    ids=json.dumps,
)
def test_objects_stay_open_if_that_is_asked_for(schema):
    assert takes(schema_matcher(schema, closed=False), {**X, "c": 1})
    assert not takes(schema_matcher(schema, closed=True), {**X, "c": 1})


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/$defs/A", {}),
        ("#/$defs/A", {"$id": "https://example.org/tool"}),
        ("https://example.org/tool#/$defs/A", {"$id": "https://example.org/tool"}),
        ("#name", {}),
        ("#old", {}),
        ("other", {"$id": "https://example.org/tool"}),
        ("#/properties/first", {}),
        ("#/properties/list/items/0", {}),
        ("#/$defs/Pair%5Bint%5D", {}),
        ("#/$defs/Pair[int]", {}),
        ("#/$defs/Gr%C3%B6%C3%9Fe", {}),
        ("#/$defs/Größe", {}),
        ("#/$defs/a~1b~0c", {}),
        ("#/definitions/$ref", {}),
    ],
)
def test_every_form_of_a_reference_leads_to_its_schema(reference, more):
    names = ("A", "Pair[int]", "Größe", "a/b~c")
    schema = {
        **more,
        **OBJECT,
        "properties": {"first": NUMBER, "list": {"type": "array", "items": [NUMBER]}, "v": {"$ref": reference}},
        "required": ["v"],
        "$defs": {
            **dict.fromkeys(names, NUMBER),
            "B": {"$anchor": "name", **NUMBER},
            "D": {"$id": "#old", **NUMBER},
            "C": {"$id": "other", **NUMBER},
        },
        "definitions": {"$ref": NUMBER},
    }
    matcher = schema_matcher(schema, closed=True)
    assert takes(matcher, {"v": 1}) and not takes(matcher, {"v": "x"})


def test_data_that_looks_like_a_schema_stays_data():
    data = {"$ref": "#/x", "format": "path", "not": {}}
    matcher = schema_matcher({**OBJECT, "properties": {"a": {"const": data}, "not": {"enum": [data]}}}, closed=True)
    assert takes(matcher, {"a": data, "not": data}) and not takes(matcher, {"a": {}})


def test_siblings_of_a_reference_have_no_effect_before_draft_2019():
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/A",
        "definitions": {"A": NUMBER},
    }
    assert takes(schema_matcher({**schema, "maximum": 3}), 4)
    assert not takes(schema_matcher({**schema, "maximum": 3, "$schema": "x"}), 4)


def test_properties_are_written_in_the_order_of_the_schema_whichever_keyword_has_them():
    schema = {"allOf": [{"properties": {"b": NUMBER}}], "properties": {"a": TEXT}, "required": ["a", "b"]}
    text = '{"b":1,"a":"x"}'
    assert takes_text(schema_matcher(schema, closed=True), text)


def test_a_schema_of_exponential_size_is_refused(monkeypatch):
    monkeypatch.setattr(json_schema, "MAX_STEPS", 1000)
    inner: dict[str, Any] = {"anyOf": [A, B]}
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(30)}
    with pytest.raises(SchemaError, match="more than 1000 schemas"):
        enforceable({"$ref": "#/$defs/d0", "$defs": {**defs, "d30": inner}}, closed=True)


def test_a_schema_that_is_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"properties": {"a": schema}}
    with pytest.raises(SchemaError, match="nested too deeply"):
        enforceable(schema, closed=True)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.floats()
    | st.sampled_from(["", "#", "#/$defs/a", "object", "string", "a", "^a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*HANDLERS, *CONCERNS, "then", "$defs", "$id", "$anchor", "a"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*HANDLERS, *CONCERNS, "$defs", "$id"]), VALUES, max_size=4), st.booleans())
def test_whatever_stands_in_a_schema_it_is_converted_or_refused(schema, closed):
    with suppress(SchemaError):
        assert json.loads(enforceable(schema, closed=closed))
