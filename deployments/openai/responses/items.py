"""Conversation items as clients send them, and their conversion to chat messages."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, field_validator

from deployments.http.body import validated
from deployments.openai.conversation import MAX_PARTS, ContentPart, ImagePart, TemplateModel, joined, known_parts
from engine.errors import InvalidParameter, RequestError

Item = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)
ITEM_TYPES = "message, reasoning, function_call, function_call_output or item_reference"
SENT_REASONING = "manta:"
"""Prefix of our `encrypted_content`. We do not encrypt it, since the client has the same text in `content`."""


class ReasoningPart(TemplateModel):
    type: Literal["reasoning_text"]
    text: str


Parts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageItem(TemplateModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts

    _known_parts = field_validator("content", mode="before")(known_parts)


class FunctionCallItem(TemplateModel):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(TemplateModel):
    call_id: str
    output: str | Parts

    _known_parts = field_validator("output", mode="before")(known_parts)


class ReasoningItem(TemplateModel):
    content: list[ReasoningPart] | None = Field(default=None, max_length=MAX_PARTS, fail_fast=True)
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning; empty if another server has encrypted it."""
        sent = self.encrypted_content or ""
        if not self.content and sent.startswith(SENT_REASONING):
            return sent.removeprefix(SENT_REASONING)
        return "\n".join(part.text for part in self.content or [])


class ItemReference(TemplateModel):
    id: str


def parsed(kind: type[Model], value: object, path: str) -> Model:
    """Return a parsed item. Raises RequestError that names the field inside `path`."""
    try:
        return validated(kind, value)
    except InvalidParameter as error:
        raise invalid(f"{path}.{error.field}", error.value, error.limit) from None
    except RequestError as error:
        raise RequestError(f"{path}.{error.message}", path.partition("[")[0]) from None


def invalid(field: str, value: object, limit: str) -> InvalidParameter:
    """Return an error whose `param` is only the top-level field of `field`."""
    error = InvalidParameter(field, value, limit)
    error.param = re.split(r"[.\[]", field, maxsplit=1)[0]
    return error


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def to_messages(items: list[Item], instructions: str | None, first: int) -> list[dict[str, Any]]:
    """Return the messages of a chat request. Raises RequestError.

    first: index of the first item of the request itself; errors give indices relative to it.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        path = f"input[{i - first}]"
        match item.get("type") or "message":
            case "message":
                message = parsed(MessageItem, item, path)
                content = _content(message.content, f"{path}.content")
                if message.role == "assistant":
                    _turn(messages, "content", "tool_calls")["content"] = content
                else:
                    messages.append({"role": message.role, "content": content})
            case "reasoning":
                _turn(messages, "reasoning", "content", "tool_calls")["reasoning"] = parsed(
                    ReasoningItem, item, path
                ).text
            case "function_call":
                call = parsed(FunctionCallItem, item, path)
                function = {"name": function_name(call.name, call.namespace), "arguments": call.arguments}
                _turn(messages).setdefault("tool_calls", []).append({"id": call.call_id, "function": function})
            case "function_call_output":
                output = parsed(FunctionCallOutputItem, item, path)
                content = _content(output.output, f"{path}.output")
                messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})
            case other:
                raise invalid(f"{path}.type", other, f"{ITEM_TYPES}, because this server has no tools of its own")
    return messages


def _turn(messages: list[dict[str, Any]], *closed_by: str) -> dict[str, Any]:
    """Return the assistant message to extend: the last message, or a new one if the last has any of the keys
    `closed_by`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(key in last for key in closed_by):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _content(content: str | list[ContentPart], path: str) -> str | list[ContentPart]:
    """Return one text, or the parts if there are images among them. path: path of the content, for errors."""
    if isinstance(content, str):
        return content
    text = joined(content)
    if isinstance(text, str):
        return text
    for i, part in enumerate(content):
        if isinstance(part, ImagePart):
            part._path = f"{path}[{i}].{part.type}"
    return content
