"""Request bodies, with OpenAI's field names and vLLM's additions.

What becomes of fields of theirs that are not here stands in foreign_fields.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from deployments.http.body import EngineBody, Number, RequestBody, StrictModel, Whole
from deployments.openai.conversation import MAX_PARTS, Message, TextPart, Tool, ToolChoice, check_tools
from deployments.openai.foreign_fields import FOREIGN_FIELDS
from deployments.openai.structural_tag import structural_tag_grammar
from engine.errors import InvalidParameter, RequestError
from engine.wire.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams

INT32 = 2**31 - 1
MAX_SEQUENCES = 1024  # of one HTTP request: prompts * n
MAX_MESSAGES = 4096
MAX_TOOLS = 512
# Variables that a chat template gets from elsewhere; `chat_template` itself would be code from outside.
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


T = TypeVar("T")
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(max_length=MAX_SEQUENCES, fail_fast=True)]


class StreamOptions(StrictModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """Padding of chunks, which this server does not do."""


class JsonSchema(StrictModel):
    name: str
    content: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Makes no difference: a response always follows its schema."""


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    """Given with the type `json_schema`, and only then."""
    format: dict[str, Any] | None = None
    """The format of a structural tag, as in vLLM."""
    structures: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    """The structures of a structural tag in its older form, which has `triggers` as well."""
    triggers: list[str] | None = Field(default=None, fail_fast=True)


class StructuredOutputs(StrictModel):
    """vLLM's alternative to `response_format`, which can do more; see StructuredOutputsParams."""

    schema_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    """Free text in which parts between tags follow a grammar; see structural_tag.py."""


class SamplingBody(EngineBody):
    """Fields of every request for text, whichever its route."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    min_tokens: Whole = Field(default=0, le=INT32)
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = Field(default=None, le=INT32)
    min_p: Number | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    seed: Whole | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] = Field(default=[])
    stop_token_ids: list[int] = Field(default=[], max_length=1024, fail_fast=True)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = Field(default=None, max_length=10_000)
    allowed_token_ids: list[int] | None = Field(default=None, max_length=2**18, fail_fast=True)
    bad_words: list[str] = Field(default=[], max_length=MAX_BAD_WORDS, fail_fast=True)
    cache_salt: str = Field(default="", max_length=1024)
    truncate_prompt_tokens: Whole | None = Field(default=None, ge=-1, le=INT32)
    """Tokens that are kept of a longer prompt; -1 for as many as leave room for `max_tokens`."""
    truncation_side: Literal["left", "right"] = "left"
    """Where a prompt that is too long is cut off: `left` keeps its end."""
    structured_outputs: StructuredOutputs | None = None
    priority: Whole = Field(default=0, ge=-INT32, le=INT32)
    """Smaller runs first, if the engine's `scheduling_policy` is `priority`."""
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] = "auto"
    """`priority` runs before all others and `flex` after them, if the engine's `scheduling_policy` is `priority`."""

    def check(self) -> None:
        super().check()
        if self.truncate_prompt_tokens == 0:
            raise InvalidParameter("truncate_prompt_tokens", 0, "-1 or at least 1")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            self.ignored.append("stream_options.include_obfuscation")


class GenerationBody(SamplingBody):
    """Fields that chat and text completions have in common."""

    foreign_fields = FOREIGN_FIELDS

    n: Whole = 1
    max_tokens: Whole | None = None
    echo: bool = False
    """Begins the response with what it continues: the prompt of a completion, the last message of a chat if that is the
    assistant's."""
    prompt_logprobs: Whole | None = None
    """Alternatives to report per token of the prompt; only without `stream`."""
    return_token_ids: bool = False
    """Adds the token ids of the prompt and of the output to the response."""
    return_tokens_as_token_ids: bool = False
    """Names tokens in log-probabilities `token_id:7` in place of their text, which several may share."""
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    """vLLM's older name for `structured_outputs.json`."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, fail_fast=True)
    guided_grammar: str | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the parameters for the engine. Raises InvalidParameter.

        defaults: values that the model's authors recommend for the fields that the request leaves open.
        """
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{
                **defaults,
                **given,
                "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
                "logit_bias": self._token_biases(),
                "max_tokens": self.token_limit(),
                "logprobs": self.num_logprobs(),
                "prompt_logprobs": self.num_prompt_logprobs(),
                "structured_outputs": self._structured_outputs(),
            }
        )

    def token_limit(self) -> int | None:
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Return how many alternatives to report per token; None for no log-probabilities at all."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return the same for the tokens of the prompt."""
        return self.prompt_logprobs

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is only allowed without stream", "prompt_logprobs")

    @property
    def served_tier(self) -> str | None:
        """The service tier that the response names; None if the request names none."""
        if "service_tier" not in self.model_fields_set:
            return None
        return self.service_tier if self.tier_priority and "service_tier" not in self.ignored else "default"

    @property
    def tier_priority(self) -> int:
        """Priority that the service tier stands for."""
        return TIER_PRIORITIES.get(self.service_tier, 0)

    def _token_biases(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise InvalidParameter("logit_bias", key, "an object whose keys are token ids")
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """Raises RequestError if both forms are given, or if one could never be enforced."""
        response_format, outputs = self.response_format, self.structured_outputs
        guided = {kind: value for kind in GUIDED if (value := getattr(self, f"guided_{kind}")) is not None}
        if guided:
            field = f"guided_{next(iter(guided))}"
            if outputs is not None or response_format is not None or len(guided) > 1:
                raise RequestError(f"{field} must be the only form that the answer is to have", field)
            return StructuredOutputsParams(**guided, field=field)
        if response_format is not None and response_format.type != "text":
            if outputs is not None:
                raise RequestError("response_format and structured_outputs do not go together", "structured_outputs")
            if response_format.type == "structural_tag":
                tag = response_format.model_dump(exclude={"type"}, exclude_none=True)
                return StructuredOutputsParams(
                    grammar=structural_tag_grammar(tag, "response_format"), field="response_format"
                )
            schema = response_format.json_schema
            if (schema is not None) != (response_format.type == "json_schema"):
                raise RequestError('response_format.json_schema goes with the type "json_schema"', "response_format")
            if schema is None:
                return StructuredOutputsParams(json_object=True, field="response_format")
            return StructuredOutputsParams(json=schema.content, field="response_format.json_schema.schema")
        if outputs is None:
            return None
        grammar = outputs.grammar
        if outputs.structural_tag is not None:
            field = "structured_outputs.structural_tag"
            if grammar is not None:
                raise RequestError("structured_outputs must have exactly one form", field)
            grammar = structural_tag_grammar(outputs.structural_tag, field)
        return StructuredOutputsParams(
            json=outputs.schema_,
            regex=outputs.regex,
            choice=outputs.choice,
            grammar=grammar,
            json_object=bool(outputs.json_object),
        )


GUIDED = ("json", "regex", "choice", "grammar")
TIER_PRIORITIES = {"priority": -1, "flex": 1}
SAMPLING_FIELDS = GenerationBody.model_fields.keys() & set(SamplingParams.__struct_fields__)
"""Fields that SamplingParams has under the same name."""


class TemplateBody(RequestBody):
    """Fields that say how the chat template renders a conversation."""

    foreign_fields = FOREIGN_FIELDS

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, for instance `enable_thinking`."""

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs

    def check_template(self) -> None:
        """Raises InvalidParameter."""
        if self.continue_final_message and self.add_generation_prompt:
            limit = "false when continue_final_message is true"
            raise InvalidParameter("add_generation_prompt", self.add_generation_prompt, limit)
        for name in self.chat_template_kwargs:
            if name in TEMPLATE_RESERVED:
                raise InvalidParameter("chat_template_kwargs", name, "variables that have no field of their own")


class ThinkingSwitch(StrictModel):
    model_config = ConfigDict(extra="ignore")  # such as a budget

    type: Literal["enabled", "disabled", "adaptive"]


class Prediction(StrictModel):
    """What the client takes the answer to be. It makes the answer faster, not different."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    """None means `auto` where there are tools. With `none` the model is not shown the tools either."""
    parallel_tool_calls: bool = True
    """False keeps only the first call of a response."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template; `none` also sets `enable_thinking` to false."""
    thinking: ThinkingSwitch | None = None
    """DeepSeek's name for the variables `thinking` and `enable_thinking` of the chat template."""
    include_reasoning: bool = True
    """False drops the reasoning from the response; the model reasons all the same."""
    thinking_token_budget: Whole | None = Field(default=None, ge=0, le=INT32)
    """vLLM's; tokens of reasoning after which the tag that ends it is forced."""
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None
    documents: list[dict[str, str]] | None = Field(default=None, max_length=MAX_PARTS)
    """Variable of the chat template, which may show them to the model."""
    prediction: Prediction | None = None
    add_special_tokens: bool = False
    """Adds them to those that the chat template brings."""

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
        if self.prediction is not None:
            self._check_predicted()

    def _check_predicted(self) -> None:
        """Refuse what OpenAI refuses beside a prediction, so that a request means the same there."""
        for field, limit, fits in (
            ("n", "1", self.n == 1),
            ("logprobs", "left out", not self.logprobs),
            ("presence_penalty", "at most 0", self.presence_penalty <= 0),
            ("frequency_penalty", "at most 0", self.frequency_penalty <= 0),
            ("max_completion_tokens", "left out, for max_tokens", self.max_completion_tokens is None),
            ("tools", "left out", not self.tools),
        ):
            if not fits:
                raise InvalidParameter(field, getattr(self, field), f"{limit} with a prediction")

    @property
    def field_variables(self) -> dict[str, dict[str, Any]]:
        """Variables of the chat template that fields of the request stand for, by the field."""
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
        """The text that the response begins with."""
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


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: str | TokenIds | Prompts[str] | Prompts[TokenIds]
    """A text, token ids, or a list of either."""
    max_tokens: Whole = 16
    """May be 0 with `echo`, for the log-probabilities of the prompt alone."""
    logprobs: Whole | None = None
    add_special_tokens: bool = True

    @property
    def echo_only(self) -> bool:
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """Return at least one prompt, none of them empty. Raises InvalidParameter."""
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
        """`prompt_logprobs`, or `logprobs` for an echo, which reports those of the prompt too."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


class TokenizeBody(TemplateBody):
    """POST /tokenize"""

    prompt: str | None = None
    """A text, in place of `messages`."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """A conversation, tokenized as a chat request would be."""
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    """Tools that the model may call in the conversation."""
    add_special_tokens: bool | None = None
    """None means yes for a prompt, as in a completion, and no for messages, whose template brings the tokens."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False
    """Adds each token as it is spelt in the vocabulary to the response."""

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if self.tools and self.messages is None:
            raise RequestError("tools is only allowed with messages", "tools")
        if self.add_special_tokens and self.messages is not None:
            limit = "false with messages, whose template brings the special tokens"
            raise InvalidParameter("add_special_tokens", self.add_special_tokens, limit)
        self.check_template()


class DetokenizeBody(RequestBody):
    """POST /detokenize"""

    foreign_fields = FOREIGN_FIELDS

    tokens: TokenIds
