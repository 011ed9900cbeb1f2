"""Responses and their stream events, with OpenAI's field names."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from deployments.openai.response_bodies import ChatTokenLogprob, CostDetails, HoldBody, NumericsBorder

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
LIVE: tuple[Status, ...] = ("queued", "in_progress")


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []
    role: Literal["assistant"] = "assistant"


class FunctionToolCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"
    namespace: str | UnsetType = UNSET


class ReasoningOutput(Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


OutputItem = OutputMessage | FunctionToolCall | ReasoningOutput
Part = OutputText | ReasoningText


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    code: ErrorCode
    message: str


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  #: computed tokens that are held
    input_tokens_per_turn: list[int] = []
    cached_tokens_per_turn: list[int] = []


class OutputTokensDetails(Struct):
    reasoning_tokens: int
    tool_output_tokens: int = 0
    output_tokens_per_turn: list[int] = []
    tool_output_tokens_per_turn: list[int] = []


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    holds: list[HoldBody] | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    cost_details: CostDetails | UnsetType = UNSET
    numerics_borders: list[NumericsBorder] | UnsetType = UNSET


class Response(Struct, kw_only=True):
    """A response, with the fields of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None
    previous_response_id: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    max_output_tokens: int | None
    truncation: Literal["auto", "disabled"]
    background: bool
    store: bool  #: also false if storing it failed
    metadata: dict[str, str]
    service_tier: str | None
    user: str | None
    safety_identifier: str | None
    max_tool_calls: None = None
    prompt: None = None
    presence_penalty: None = None
    frequency_penalty: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    input_messages: None = None
    output_messages: None = None


class InputItems(Struct):
    """A page of a request's input items, GET /v1/responses/{response_id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class StreamEvent(Struct, tag_field="type", kw_only=True):
    sequence_number: int


class ResponseEvent(StreamEvent, kw_only=True):
    """An event that contains the response in its current state."""

    response: Response


class ResponseCreated(ResponseEvent, tag="response.created"):
    pass


class ResponseQueued(ResponseEvent, tag="response.queued"):
    pass


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    pass


class ResponseEnd(ResponseEvent, kw_only=True):
    """The last event of a stream."""


class ResponseCompleted(ResponseEnd, tag="response.completed"):
    pass


class ResponseIncomplete(ResponseEnd, tag="response.incomplete"):
    pass


class ResponseFailed(ResponseEnd, tag="response.failed"):
    pass


class OutputItemAdded(StreamEvent, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemDone(StreamEvent, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class ItemEvent(StreamEvent, kw_only=True):
    output_index: int
    item_id: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


class PartEvent(ItemEvent, kw_only=True):
    content_index: int = 0  #: always 0, since items have one part


class ContentPartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: Part


class ContentPartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: Part


class TextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ErrorEvent(StreamEvent, tag="error", kw_only=True):
    code: str
    message: str
    param: str | None
