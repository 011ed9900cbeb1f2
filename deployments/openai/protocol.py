"""Bodies of requests, with OpenAI's field names and vLLM's additions.

A field that would change the answer and is not supported is refused, never ignored.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from engine.errors import InvalidParameter, RequestError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

# Accepted and not used: they do not change the text.
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "request_id",
}
# Not supported, but clients send them with the value that means "off".
NEUTRAL: dict[str, list[JsonValue]] = {
    "best_of": [1],
    "suffix": [""],
    "tools": [],
    "tool_choice": ["none", "auto"],
    "functions": [],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "use_beam_search": [False],
    "length_penalty": [1, 1.0],
    "spaces_between_special_tokens": [True],
    "priority": [0],
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(BaseModel):
    """What chat and text completions have in common. None, or absent, means the default of the model or server."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
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
    def _drop_what_changes_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        return {
            name: value
            for name, value in body.items()
            if value is not None and (name in known or (name not in HARMLESS and not _is_neutral(name, value)))
        }

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
            }
        )

    def token_limit(self) -> int | None:
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None for no log-probabilities at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise RequestError for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")

    def _token_biases(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not key.isdecimal():
                raise InvalidParameter("logit_bias", key, "an object whose keys are token ids")
        return {int(key): bias for key, bias in self.logit_bias.items()}


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Fields beyond these are given to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """With its content as one text, which is what templates of text models expect."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
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
        if self.continue_final_message and self.add_generation_prompt:
            limit = "false when continue_final_message is true"
            raise InvalidParameter("add_generation_prompt", self.add_generation_prompt, limit)

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions

    prompt: a text, token ids, or a list of either.
    max_tokens: 0 only with `echo`, for the log-probabilities of the prompt alone.
    """

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

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


Body = TypeVar("Body", bound=GenerationBody)


def parse(kind: type[Body], raw: bytes) -> Body:
    """Raises RequestError that names the field, its value and what is expected."""
    try:
        body = kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise _first_problem(error) from None
    body.check()
    return body


def _is_neutral(name: str, value: JsonValue) -> bool:
    return name in NEUTRAL and value in NEUTRAL[name]


def _first_problem(error: pydantic.ValidationError) -> RequestError:
    problem = error.errors(include_url=False)[0]
    # locations inside a union name the union's branch after the field; the user knows the field only
    path = [str(part) for part in problem["loc"]]
    field = path[0] if path else None
    match problem["type"]:
        case "json_invalid":
            return RequestError(f"the body is not valid JSON: {problem['ctx']['error']}")
        case "missing":
            return RequestError(f"{'.'.join(path)} is required", field)
        case "extra_forbidden":
            return RequestError(f"{'.'.join(path)} is not supported by this server", field)
        case _ if field is None:
            return RequestError("the body must be a JSON object")
        case _:
            expected = problem["msg"].replace("Input should be ", "")
            return InvalidParameter(field, problem["input"], expected)
