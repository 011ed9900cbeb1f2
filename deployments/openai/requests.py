"""Bodies of requests, with OpenAI's field names and vLLM's additions.

A field that would change the answer and is not supported is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.openai.problems import validation_error
from deployments.openai.response_format import ResponseFormat, StructuredOutputs, structured_outputs
from deployments.openai.tools import Tool, ToolCall, ToolChoice, check_tools
from deployments.openai.unsupported import has_no_effect
from engine.errors import InvalidParameter, RequestError
from engine.wire.sampling_params import MAX_LOGPROBS, SamplingParams

INT32 = 2**31 - 1
# What a chat template gets from elsewhere; `chat_template` itself would be code from outside.
TEMPLATE_RESERVED = {
    "self",
    "messages",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "return_assistant_tokens_mask",
    "add_generation_prompt",
    "continue_final_message",
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Literal[False] | None = False  # padding of chunks, which is not done here


class RequestBody(BaseModel):
    """A JSON object. null means the same as absent: the default of the model or server."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {k: v for k, v in body.items() if v is not None} if isinstance(body, dict) else body

    def check(self) -> None:
        """Raise RequestError for fields that do not go together."""


class GenerationBody(RequestBody):
    """What chat and text completions have in common.

    user, safety_identifier: whose fair share of the server a request counts to, where there are no API keys.
    request_id: part of the answer's id, in place of the header X-Request-Id, which Serve gives every request.
    priority: smaller runs first, if the engine's `scheduling_policy` is `priority`.
    """

    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = Field(default=0, le=INT32)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, le=INT32)
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    cache_salt: str = ""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(default=0, ge=-INT32, le=INT32)
    user: str | None = None
    safety_identifier: str | None = None
    request_id: str | None = None

    # fields that SamplingParams takes under the same name
    _SAMPLING: ClassVar[tuple[str, ...]] = (
        "n",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "allowed_token_ids",
        "bad_words",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        return {name: value for name, value in body.items() if name in known or not has_no_effect(name, value)}

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """defaults: what the model's authors recommend, for fields that the request leaves open.

        Raises InvalidParameter.
        """
        given = {name: getattr(self, name) for name in self._SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            **{
                **defaults,
                **given,
                "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
                "logit_bias": self._token_biases(),
                "max_tokens": self.token_limit(),
                "logprobs": self.num_logprobs(),
                "structured_outputs": structured_outputs(self.response_format, self.structured_outputs),
            }
        )

    def token_limit(self) -> int | None:
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None for no log-probabilities at all."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")

    def _token_biases(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise InvalidParameter("logit_bias", key, "an object whose keys are token ids")
        return {int(key): bias for key, bias in self.logit_bias.items()}


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Fields beyond these are given to the chat template as they are.

    reasoning, reasoning_content: of an assistant's earlier answer; the second name is what other servers call it.
    audio, function_call: not supported; clients that send back an answer have them as null.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """With its content as one text, which is what templates of text models expect."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        message = {**extra, "role": self.role, "content": text}
        if self.tool_calls:  # some templates only look whether there is such a key
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if reasoning := self.reasoning or self.reasoning_content:
            message["reasoning"] = message["reasoning_content"] = reasoning
        return message


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a chat template is to be used. variables: of the template, beyond these."""

    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]

    def check(self) -> None:
        """Raises InvalidParameter."""
        if self.continue_final_message and self.add_generation_prompt:
            limit = "false when continue_final_message is true"
            raise InvalidParameter("add_generation_prompt", self.add_generation_prompt, limit)
        for name in self.variables:
            if name in TEMPLATE_RESERVED:
                raise InvalidParameter("chat_template_kwargs", name, "variables that have no field of their own")


class ChatBody(GenerationBody):
    """POST /v1/chat/completions

    tool_choice: None means `auto` where there are tools. With `none` the model is not shown the tools either.
    parallel_tool_calls: False keeps only the first call of an answer.
    include_reasoning: False drops the reasoning from the answer; the model reasons all the same.
    chat_template_kwargs: variables of the chat template, for instance `enable_thinking`.
    """

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(default=None, min_length=1)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs is only allowed with logprobs=true", "top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidParameter("top_logprobs", self.top_logprobs, f"between 0 and {MAX_LOGPROBS}")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise InvalidParameter("max_completion_tokens", self.max_completion_tokens, "at least 1")
        self.template.check()
        check_tools(self.tools, self.tool_choice)

    @property
    def offered_tools(self) -> list[Tool]:
        """Those that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template(self) -> TemplateOptions:
        return TemplateOptions(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions

    prompt: a text, token ids, or a list of either.
    max_tokens: 0 only with `echo`, for the log-probabilities of the prompt alone.
    prompt_logprobs: alternatives to report per token of the prompt; only without `stream`.
    return_token_ids: also the ids of prompt and answer.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    return_token_ids: bool = False

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is only allowed without stream", "prompt_logprobs")

    @property
    def echo_only(self) -> bool:
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """At least one prompt, none of them empty. Raises InvalidParameter."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts or not all(prompts):
            raise InvalidParameter("prompt", self.prompt, "a text, or token ids, that are not empty")
        return prompts

    def token_limit(self) -> int | None:
        return 1 if self.echo_only else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """What the engine has to report; an echo has logprobs too."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((k for k in wanted if k is not None), default=None)


Body = TypeVar("Body", bound=RequestBody)


def parse(kind: type[Body], raw: bytes) -> Body:
    """Raises RequestError that names the field, its value and what is expected."""
    try:
        body = kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise validation_error(error) from None
    body.check()
    return body
