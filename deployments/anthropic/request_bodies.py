"""Request bodies, with Anthropic's field names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from deployments.anthropic.conversation import Block, Text, Turn, chat_messages
from deployments.http.body import RequestBody, StrictModel, UsageOptions
from deployments.http.validation import ForeignFields, validation_error
from deployments.openai.cache_marks import CacheControl
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import (
    FUNCTION_NAME,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from deployments.openai.sampling_body import INT32, JsonSchema, ResponseFormat
from deployments.openai.template_body import MAX_MESSAGES, MAX_TOOLS, TokenizeBody
from engine.errors import InvalidParameter
from engine.wire.sampling_params import MAX_STOP_STRINGS

FOREIGN_FIELDS = ForeignFields(
    unused={
        "fallback_credit_token": "the server does not bill",
        "service_tier": "the server has no service tiers for this API",
    },
    ignored={
        "billing_policy": "the server does not bill",
        "context_management": "the server does not edit conversations",
        "diagnostics": "the server does not report why a prompt was not cached",
        "fallbacks": "the server declines no requests, so it needs no other model",
        "speed": "all requests run at full speed",
    },
    refused={
        "compaction": "ask for a summary in a message instead",
        "container": "the server runs no code",
        "inference_geo": "the server computes requests only at its own location",
        "mcp_servers": "the server does not call MCP servers; the client has to call their tools",
        "output_format": "use output_config.format",
        "thread": "the server stores no conversations; send the whole conversation",
    },
    neutral={"speed": ["standard"]},
)


class CustomTool(Block):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    """Whether to enforce the schema."""
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, tool: object) -> object:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            limit = f"a tool with an input_schema, because only Anthropic's models know the tool {str(kind)[:64]}"
            raise PydanticCustomError("not_custom", "{limit}", {"limit": limit})
        return tool

    def for_chat(self) -> Tool:
        function = FunctionDefinition(name=self.name, parameters=self.input_schema)
        if self.description is not None:
            function.description = self.description
        if self.strict is not None:
            function.strict = self.strict
        return Tool(type="function", function=function, cache_control=self.cache_control)


class ToolChoiceBody(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Tool that must be called; required with the type `tool`, and only allowed then."""
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> ToolChoice:
        match self.type:
            case "tool":
                return NamedToolChoice(type="function", function=FunctionName(name=self.name or ""))
            case "any":
                return "required"
            case kind:
                return kind


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=INT32)
    """Number of reasoning tokens after which the end of reasoning is forced; required with the type `enabled`, and only
    allowed then."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` drops the reasoning from the response; the model still reasons."""


class JsonOutputFormat(StrictModel):
    type: Literal["json_schema"]
    content: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Variable `reasoning_effort` of the chat template."""
    format: JsonOutputFormat | None = None


class Metadata(Block):
    user_id: str | None = Field(default=None, max_length=1024)
    """User whose fair share of the server the request uses, if the server has no API keys."""


class CountTokensBody(RequestBody):
    """POST /v1/messages/count_tokens"""

    foreign_fields = FOREIGN_FIELDS

    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """The conversation. If its last turn is the assistant's, the answer continues it."""
    system: Text = ""
    tools: list[CustomTool] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceBody | None = None
    """How the model may use the tools. With the type `none` it does not see them either."""
    thinking: Thinking | None = None
    """Sets the variable `enable_thinking` of the chat template; if not given, the template decides."""
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    """Asks that the prompt stays cached up to the end of the last message."""

    def check(self) -> None:
        choice, thinking = self.tool_choice, self.thinking
        if choice is not None and (choice.name is not None) != (choice.type == "tool"):
            raise InvalidParameter("tool_choice.name", choice.name, "given with the type tool, and only then")
        if thinking is not None and (thinking.budget_tokens is not None) != (thinking.type == "enabled"):
            limit = "given with the type enabled, and only then"
            raise InvalidParameter("thinking.budget_tokens", thinking.budget_tokens, limit)

    def for_tokenize(self) -> TokenizeBody:
        """Return the body of a request that counts the prompt's tokens. Raises RequestError."""
        chat = self._chat(ChatBody)
        return TokenizeBody(
            messages=chat.messages,
            tools=chat.offered_tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template_kwargs=chat.template_variables,
        )

    def _chat(self, kind: type[ChatBody], **more: Any) -> ChatBody:
        """Return the chat. kind: its class. more: further fields, which do not change its prompt."""
        messages = chat_messages(self.system, self.messages)
        continued = messages[-1].role == "assistant"
        if continued and messages[-1].tool_calls:
            raise InvalidParameter("messages", "tool_use at the end", "a conversation with a tool_result per tool_use")
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        thinking, answer_format = self.thinking, None
        disabled = thinking is not None and thinking.type == "disabled"
        if output.format is not None:
            schema = JsonSchema(name="output", schema=output.format.content)
            answer_format = ResponseFormat(type="json_schema", json_schema=schema)
        try:
            chat = kind(
                model=self.model,
                messages=messages,
                tools=[tool.for_chat() for tool in self.tools] or None,
                tool_choice=None if choice is None else choice.for_chat(),
                parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
                reasoning_effort="none" if disabled else output.effort,
                include_reasoning=thinking is None or thinking.display != "omitted",
                chat_template_kwargs={} if thinking is None or disabled else {"enable_thinking": True},
                response_format=answer_format,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **{name: value for name, value in self._of_parts().items() if name in kind.model_fields},
                **more,
            )
        except pydantic.ValidationError as error:
            raise validation_error(error, self.foreign_fields) from None
        chat.check()
        return chat

    def _of_parts(self) -> dict[str, Any]:
        """Return fields of the chat that parts may have added."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return {"thinking_token_budget": budget, "cache_control": self.cache_control}


class MessagesBody(CountTokensBody):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    """Maximum number of output tokens. If it exceeds the model's context, the context is the limit."""
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], max_length=MAX_STOP_STRINGS, fail_fast=True
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    usage: UsageOptions | None = None

    def for_chat(self, max_model_len: int, kind: type[ChatBody]) -> ChatBody:
        """Return the equivalent chat. kind: its class. Raises RequestError."""
        return self._chat(
            kind,
            max_tokens=min(self.max_tokens, max_model_len),
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            user=self.metadata.user_id if self.metadata else None,
            usage=self.usage,
        )

    def all_ignored(self, chat: ChatBody, ignored: list[str]) -> list[str]:
        """Return the fields that had no effect, with chat fields under their names in this API."""
        effort = "thinking" if chat.reasoning_effort == "none" else "output_config.effort"
        names = {"reasoning_effort": effort, "thinking_token_budget": "thinking.budget_tokens"}
        return [*self.ignored, *(names.get(name, name) for name in ignored)]
