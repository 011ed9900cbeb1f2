"""Converts the turns of Anthropic's conversations, whose content is blocks, to chat messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployments.openai.cache_marks import CacheControl
from deployments.openai.conversation import MAX_PARTS, ContentPart, FunctionCall, ImagePart, Message, TextPart, ToolCall

BLOCKS = {  # types of blocks that a turn may have, by its role
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
BILLING = "x-anthropic-billing-header:"
"""Start of a text that Claude Code puts before the system prompt. It differs between requests, so it would prevent
prefix cache hits."""


class Block(BaseModel):
    """A JSON object. Fields other than these are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)


class MarkableBlock(Block):
    cache_control: CacheControl | None = None
    """Asks that the prompt up to here stays cached."""


class TextBlock(MarkableBlock):
    type: Literal["text"]
    text: str


class Base64Source(Block):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    """Ignored: the type is recognised from the image's content."""
    data: str


class UrlSource(Block):
    type: Literal["url"]
    url: str


class ImageBlock(MarkableBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    def part(self, path: str) -> ImagePart:
        """Return the image as part of a chat message. path: path of the block, for errors."""
        source = self.source
        url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
        part = ImagePart(type="image_url", image_url=url, cache_control=self.cache_control)
        part._path = f"{path}.source"
        return part


class ThinkingBlock(Block):
    """Reasoning of an earlier response. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Reasoning that only Anthropic's servers can read; left out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MarkableBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


Text = str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]
ToolContent = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(MarkableBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ToolContent], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: object) -> object:
        return check_blocks(content, ("text", "image"), "a tool's result")

    def message(self, path: str) -> Message:
        """Return the result as a chat message. path: path of the block, for errors."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []
        parts: list[ContentPart] = [_part(block, f"{path}.content[{i}]") for i, block in enumerate(blocks)]
        if self.is_error:
            parts.insert(0, TextPart(type="text", text="Error:"))
        if self.cache_control is not None:
            parts = parts or [TextPart(type="text", text="")]
            parts[-1].cache_control = self.cache_control
        return Message.model_validate({"role": "tool", "content": parts, "tool_call_id": self.tool_use_id})


ContentBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]

    @field_validator("content", mode="before")
    @classmethod
    def _is_read(cls, content: object, info: ValidationInfo) -> object:
        role = info.data.get("role")
        return content if role is None else check_blocks(content, BLOCKS[role], f"a turn of the role {role}")

    def blocks(self) -> list[ContentBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


def check_blocks(content: object, allowed: tuple[str, ...], where: str) -> object:
    """Raise an error that names a block of an unsupported type. Pydantic would report one error for each branch of the
    union, and hide this one."""
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in allowed:
            limit = (
                f"text or blocks of the types {', '.join(allowed)} in {where}: {kind[:64]} blocks are not read there"
            )
            raise PydanticCustomError("not_read", "{limit}", {"limit": limit})
    return content


def text_parts(content: Text) -> list[TextPart]:
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [TextPart(type="text", text=block.text, cache_control=block.cache_control) for block in content]


def _part(block: TextBlock | ImageBlock, path: str) -> ContentPart:
    if isinstance(block, TextBlock):
        return TextPart(type="text", text=block.text, cache_control=block.cache_control)
    return block.part(path)


def chat_messages(system: Text, turns: list[Turn]) -> list[Message]:
    """Return the conversation with one message per tool result, and with consecutive turns of one role merged:
    Anthropic's API treats them as one."""
    messages = []
    parts = [part for part in text_parts(system) if part.text and not part.text.startswith(BILLING)]
    if parts:
        messages.append(Message(role="system", content=[*parts]))
    for i, turn in enumerate(turns):
        for j, block in enumerate(turn.blocks()):
            path = f"messages[{i}].content[{j}]"
            if isinstance(block, ToolResultBlock):
                messages.append(block.message(path))
                continue
            if not messages or messages[-1].role != turn.role:
                messages.append(Message(role=turn.role, content=[]))
            _extend(messages[-1], block, path)
    return messages


def _extend(
    message: Message,
    block: TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    path: str,
) -> None:
    match block:
        case TextBlock() | ImageBlock():
            assert isinstance(message.content, list)
            message.content.append(_part(block, path))
        case ThinkingBlock():
            message.reasoning = (
                block.thinking if message.reasoning is None else f"{message.reasoning}\n{block.thinking}"
            )
        case ToolUseBlock():
            if block.cache_control is not None and isinstance(message.content, list) and message.content:
                message.content[-1].cache_control = block.cache_control  # a call has no place for a mark of its own
            call = ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input))
            message.tool_calls = [*(message.tool_calls or []), call]
