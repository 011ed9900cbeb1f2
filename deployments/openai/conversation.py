"""Conversation of a chat request: its messages and tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from deployments.http.body import StrictModel
from deployments.openai.cache_marks import CacheBreakpoint, CacheControl
from engine.errors import InvalidParameter

MAX_PARTS = 1024  # per message
OTHER_PARTS = ("image", "input_audio", "audio_url", "video_url", "video", "file", "input_file")
Detail = Literal["auto", "low", "high", "original"]
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class TemplateModel(BaseModel):
    """A JSON object that is passed to the chat template, unknown fields included."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class FunctionDefinition(TemplateModel):
    """A function that the model may call. The chat template gets all its fields, even those not listed here."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON schema of the arguments; None for a function without arguments."""
    strict: bool | None = None


class Tool(TemplateModel):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = Field(default=None, exclude=True)
    """Asks that the tools up to this one stay cached."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        parameters = self.function.parameters
        return NO_PARAMETERS if parameters is None else {"type": "object", **parameters}


class FunctionName(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    """The model must call this function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(TemplateModel):
    name: str
    arguments: str | dict[str, JsonValue] = ""


class ToolCall(TemplateModel):
    """A call made by an earlier assistant message of the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {**super().for_template(), "type": self.type}


class Part(BaseModel):
    """A part of a message. Other keys are not passed to the model."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    cache_control: CacheControl | None = None
    """Asks that the prompt up to here stays cached."""
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    """OpenAI's form of `cache_control`."""


class TextPart(Part):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Part):
    """Text with which the model refused in an earlier turn."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class ImageUrl(Part):
    url: str
    detail: Detail | None = None


class ImagePart(Part):
    """An image, in the form of a chat (`image_url`) or of the Responses API (`input_image`)."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str
    """An http:, https: or data: URL."""
    detail: Detail | None = None
    """`low` may downscale the image to take fewer tokens; all other values are equivalent."""
    _path: str = PrivateAttr("")
    """Path of the part for errors, if the request came through another API than chat."""

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url

    @property
    def low_detail(self) -> bool:
        inner = None if isinstance(self.image_url, str) else self.image_url.detail
        return "low" in (self.detail, inner)


ContentPart = TextPart | RefusalPart | ImagePart


def known_parts(content: object) -> object:
    """Raise an error that names a part of an unsupported type. Pydantic would report one error for each branch of the
    union, and hide this one."""
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in OTHER_PARTS:
            limit = f"a list of texts and images; part [{i}] is of the unsupported type {kind}"
            raise PydanticCustomError("not_read", "{limit}", {"limit": limit})
        if kind in ("image_url", "input_image"):
            try:
                ImagePart.model_validate(part)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                limit = f"a list whose part [{i}] is an image with a URL in image_url ({first['msg']})"
                raise PydanticCustomError("not_an_image", "{limit}", {"limit": limit}) from None
    return content


def joined(parts: list[ContentPart]) -> str | list[dict[str, Any]]:
    """Return parts as chat templates expect them: as one text, or, if there are images, as a list."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return "\n".join(part.text for part in parts if not isinstance(part, ImagePart))
    return [{"type": "image"} if isinstance(p, ImagePart) else {"type": "text", "text": p.text} for p in parts]


class Message(TemplateModel):
    """One turn. The chat template gets all its fields, even those not listed here."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """`function` is the old name of `tool`."""
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_PARTS, fail_fast=True)
    reasoning: str | None = None
    """Reasoning of an earlier assistant message."""
    reasoning_content: str | None = None
    """Other servers' name for `reasoning`."""
    audio: None = None
    """Not supported; null in responses that clients send back."""
    function_call: FunctionCall | None = None
    """The old form of `tool_calls`."""

    _known_parts = field_validator("content", mode="before")(known_parts)

    def for_template(self) -> dict[str, Any]:
        """Return the message with its content as one text, as templates of text models expect, unless it has images."""
        content = joined(self.content) if isinstance(self.content, list) else self.content or ""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        message = {**extra, "role": "tool" if self.role == "function" else self.role, "content": content}
        calls = self.tool_calls or ([ToolCall(function=self.function_call)] if self.function_call else [])
        if calls:  # some templates only check whether the key exists
            message["tool_calls"] = [call.for_template() for call in calls]
        if reasoning := self.reasoning or self.reasoning_content:
            message["reasoning"] = message["reasoning_content"] = reasoning
        return message


def image_parts(messages: list[Message]) -> Iterator[tuple[str, ImagePart]]:
    """Yield the images of a conversation in order, each with its path for errors."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield part._path or f"messages[{i}].content[{j}].{part.type}", part


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Raise InvalidParameter for invalid tools, or for a choice that does not match them."""
    names: dict[str, None] = {}  # in order
    for i, tool in enumerate(tools or []):
        if tool.function.name in names:
            raise InvalidParameter(
                f"tools[{i}].function.name", tool.function.name, "different from the names of all other tools"
            )
        names[tool.function.name] = None
        if tool.arguments_schema["type"] != "object":
            field = f"tools[{i}].function.parameters"
            raise InvalidParameter(field, tool.function.parameters, 'a JSON schema of type "object"')
    match choice:
        case "required" | NamedToolChoice() if not tools:
            name = choice if isinstance(choice, str) else choice.function.name
            raise InvalidParameter("tool_choice", name, '"none" or "auto" if the request has no tools')
        case NamedToolChoice(function=FunctionName(name=name)) if name not in names:
            raise InvalidParameter("tool_choice", name, f"one of the tools ({', '.join(names)})")
