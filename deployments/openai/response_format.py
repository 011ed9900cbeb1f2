"""What form an answer must have: OpenAI's `response_format`, and vLLM's `structured_outputs`, which can do more."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import RequestError
from engine.wire.structured_outputs import StructuredOutputsParams


class JsonSchema(BaseModel):
    """strict: an answer always follows its schema, so that it makes no difference."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    content: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """json_schema: with the type of that name, and only then."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """See StructuredOutputsParams."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def structured_outputs(
    response_format: ResponseFormat | None, structure: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """None for text of any form. Raises RequestError if both are given, or if one could never be enforced."""
    form = None if response_format is None or response_format.type == "text" else response_format
    if form is not None and structure is not None:
        raise RequestError("response_format and structured_outputs do not go together", "structured_outputs")
    if form is not None:
        return _response_format_params(form)
    if structure is None:
        return None
    return StructuredOutputsParams(
        json=structure.schema_,
        regex=structure.regex,
        choice=structure.choice,
        grammar=structure.grammar,
        json_object=bool(structure.json_object),
    )


def _response_format_params(form: ResponseFormat) -> StructuredOutputsParams:
    if (form.json_schema is not None) != (form.type == "json_schema"):
        raise RequestError('response_format.json_schema goes with the type "json_schema"', "response_format")
    if form.json_schema is None:
        return StructuredOutputsParams(json_object=True, field="response_format")
    return StructuredOutputsParams(json=form.json_schema.content, field="response_format.json_schema.schema")
