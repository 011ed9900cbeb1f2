"""Response bodies and stream events, with Anthropic's field names. Each has its name as `type`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from deployments.openai.chat_output import ChatOutput
from deployments.openai.response_bodies import CostDetails, CostFields, HoldBody, NumericsBorder

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class CacheCreation(msgspec.Struct):
    """Tokens that were computed and are now held, by the duration of the hold."""

    ephemeral_5m_input_tokens: int
    """For up to five minutes."""
    ephemeral_1h_input_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    """Tokens of the prompt that were neither cached nor held."""
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    """Computed tokens that are held."""
    cache_creation: CacheCreation | msgspec.UnsetType = msgspec.UNSET
    """UNSET, as `holds` is, unless the request asks for holds."""
    holds: list[HoldBody] | msgspec.UnsetType = msgspec.UNSET
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """UNSET unless the model is known to reason."""
    cost: float | msgspec.UnsetType = msgspec.UNSET
    cost_details: CostDetails | msgspec.UnsetType = msgspec.UNSET
    numerics_borders: list[NumericsBorder] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, output: ChatOutput, *, ended: bool = False) -> Usage:
        """ended: whether the cost is known, if the request asks for it."""
        usage, thinking = output.usage, output.reasoning_tokens
        cost = CostFields.of(usage, asked=ended and output.reports_cost)
        written, created = usage.held_tokens(), CacheCreation(usage.held_tokens(0, 300), usage.held_tokens(300))
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - written,
            cache_creation_input_tokens=written,
            cache_creation=created if usage.holds else msgspec.UNSET,
            holds=HoldBody.all_of(usage),
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=msgspec.UNSET if thinking is None else OutputTokensDetails(thinking),
            cost=cost.cost,
            cost_details=cost.details,
            numerics_borders=NumericsBorder.all_of(usage),
        )


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Content = TextContent | ThinkingContent | ToolUseContent


class AnthropicMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Content]
    usage: Usage
    role: str = "assistant"
    stop_reason: StopReason | None = None
    """None in the first event of a stream."""
    stop_sequence: str | None = None


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Content


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop


class TokenCount(msgspec.Struct):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int
