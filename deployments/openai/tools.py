"""The tools of a chat request, and the structure that a forced call of them must have."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from engine.errors import InvalidParameter

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDefinition(BaseModel):
    """Fields beyond these are given to the chat template as they are.

    parameters: a JSON schema of the arguments; None means that there are none.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)

    @property
    def arguments_schema(self) -> dict[str, Any]:
        parameters = self.function.parameters
        return NO_PARAMETERS if parameters is None else {"type": "object", **parameters}


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedToolChoice(BaseModel):
    """The model must call this function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: str | dict[str, JsonValue] = ""


class ToolCall(BaseModel):
    """A call that an assistant's message of the conversation made."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """With its arguments as an object, which templates write into the prompt as JSON.

        Arguments that are no JSON object stay a text: a client may well send back a call that max_tokens cut off.
        """
        call = self.model_dump(exclude_unset=True)
        arguments = self.function.arguments
        call["type"] = self.type
        call["function"]["arguments"] = parse_arguments(arguments) if isinstance(arguments, str) else arguments
        return call


def parse_arguments(arguments: str) -> dict[str, Any] | str:
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Raise InvalidParameter for tools and a choice that do not go together."""
    names = [tool.function.name for tool in tools or []]
    for i, tool in enumerate(tools or []):
        if names.index(tool.function.name) < i:
            raise InvalidParameter(f"tools[{i}].function.name", tool.function.name, "different from all other names")
        if tool.arguments_schema["type"] != "object":
            field = f"tools[{i}].function.parameters"
            raise InvalidParameter(field, tool.function.parameters, 'a JSON schema of type "object"')
    match choice:
        case "required" | NamedToolChoice() if not tools:
            raise InvalidParameter("tool_choice", _choice_name(choice), '"none" or "auto" where no tools are given')
        case NamedToolChoice(function=FunctionName(name=name)) if name not in names:
            raise InvalidParameter("tool_choice", name, f"one of the tools ({', '.join(names)})")


def calls_schema(tools: list[Tool], key: str, pointer: str, *, strict_only: bool) -> dict[str, Any]:
    """JSON schema of a call of one of `tools`.

    key: what the model calls the arguments. pointer: where the schema will stand in a larger one, as a JSON pointer.
    strict_only: tools that are not strict take any arguments.
    """
    calls = []
    for i, tool in enumerate(tools):
        arguments: dict[str, Any] = {"type": "object"}
        if tool.function.strict or not strict_only:
            arguments = _rebase_refs(tool.arguments_schema, f"{pointer}/anyOf/{i}/properties/{key}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, key: arguments},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def _rebase_refs(schema: Any, pointer: str) -> Any:
    """`schema` as a part of a larger one, where it stands at `pointer`: its references to itself have to follow."""
    if isinstance(schema, list):
        return [_rebase_refs(entry, pointer) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {key: _rebase_refs(value, pointer) for key, value in schema.items()}
    reference = rebased.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = pointer + reference[1:]
    return rebased


def _choice_name(choice: ToolChoice) -> str:
    return choice if isinstance(choice, str) else choice.function.name
