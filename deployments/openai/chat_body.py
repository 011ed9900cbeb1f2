"""Body of a chat request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from deployments.http.body import StrictModel, Whole
from deployments.openai.conversation import MAX_PARTS, Message, Tool, ToolChoice, check_tools
from deployments.openai.sampling_body import GenerationBody
from deployments.openai.template_body import MAX_MESSAGES, MAX_TOOLS, TemplateBody
from engine.errors import InvalidParameter, RequestError
from engine.wire.sampling_params import MAX_LOGPROBS


class ThinkingSwitch(StrictModel):
    model_config = ConfigDict(extra="ignore")  # such as a budget

    type: Literal["enabled", "disabled", "adaptive"]


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    """None means `auto` if there are tools. With `none` the model does not see the tools either."""
    parallel_tool_calls: bool = True
    """False keeps only the first call of a response."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template; `none` also sets `enable_thinking` to false."""
    thinking: ThinkingSwitch | None = None
    """DeepSeek's name for the variables `thinking` and `enable_thinking` of the chat template."""
    include_reasoning: bool = True
    """False drops the reasoning from the response; the model still reasons."""
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None
    documents: list[dict[str, str]] | None = Field(default=None, max_length=MAX_PARTS)
    """Variable of the chat template, which may show the documents to the model."""
    add_special_tokens: bool = False
    """Whether to add special tokens in addition to those of the chat template."""

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None:
            if self.top_logprobs and not self.logprobs:
                raise RequestError("top_logprobs is only allowed with logprobs=true", "top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidParameter("top_logprobs", self.top_logprobs, f"between 0 and {MAX_LOGPROBS}")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise InvalidParameter("max_completion_tokens", self.max_completion_tokens, "at least 1")
        self.check_template()
        check_tools(self.tools, self.tool_choice)

    @property
    def field_variables(self) -> dict[str, dict[str, Any]]:
        """The fields of the request that set variables of the chat template, each with its variables."""
        fields: dict[str, dict[str, Any]] = {}
        if self.reasoning_effort is not None:
            switch = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
            fields["reasoning_effort"] = {"reasoning_effort": self.reasoning_effort, **switch}
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            fields["thinking"] = {"thinking": on, "enable_thinking": on}
        if self.documents:
            fields["documents"] = {"documents": self.documents}
        return fields

    @property
    def template_variables(self) -> dict[str, Any]:
        variables = [*self.field_variables.values(), self.chat_template_kwargs]
        return {name: value for some in variables for name, value in some.items()}

    @property
    def echoed(self) -> str:
        """Text with which the response begins, because of `echo`."""
        last = self.messages[-1].for_template()
        return str(last["content"]) if self.echo and last["role"] == "assistant" else ""

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
