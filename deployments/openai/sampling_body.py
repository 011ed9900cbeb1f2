"""Fields of all requests for text, on any route, with OpenAI's field names and vLLM's additions.

foreign_fields.py lists the treatment of OpenAI's and vLLM's other fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.http.body import EngineBody, Number, StrictModel, Whole
from deployments.openai.foreign_fields import FOREIGN_FIELDS
from deployments.openai.structural_tag import structural_tag_grammar
from engine.errors import InvalidParameter, RequestError
from engine.wire.sampling_params import MAX_BAD_WORDS, SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams

INT32 = 2**31 - 1


class StreamOptions(StrictModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False
    """Padding of chunks; not supported."""

    @property
    def continuous(self) -> bool:
        """Whether each chunk has the usage so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


class JsonSchema(StrictModel):
    name: str
    content: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Has no effect: a response always follows its schema."""


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    """Required with the type `json_schema`, and only allowed then."""
    format: dict[str, Any] | None = None
    """Format of a structural tag, as in vLLM."""
    structures: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    """Structures of a structural tag in its older form, which also has `triggers`."""
    triggers: list[str] | None = Field(default=None, fail_fast=True)


class StructuredOutputs(StrictModel):
    """vLLM's more powerful alternative to `response_format`; see StructuredOutputsParams."""

    schema_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None
    """Whether an object whose schema lists properties, and says nothing of others, has no others. Default: yes, or what
    the model's `structured_outputs_config` says."""
    structural_tag: str | dict[str, Any] | None = None
    """Text in which the parts between tags follow a grammar; see structural_tag.py."""


class SamplingBody(EngineBody):
    """Fields of every request for text, on any route."""

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
    """Length to cut longer prompts to, in tokens; -1 for the context less `max_tokens`."""
    truncation_side: Literal["left", "right"] = "left"
    """Side on which a longer prompt is cut: `left` keeps its end."""
    structured_outputs: StructuredOutputs | None = None
    priority: Whole = Field(default=0, ge=-INT32, le=INT32)
    """Requests with smaller numbers run first, if the engine's `scheduling_policy` is `priority`."""
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] = "auto"
    """`priority` runs before other tiers and `flex` after them, if the engine's `scheduling_policy` is `priority`."""

    def check(self) -> None:
        super().check()
        if self.truncate_prompt_tokens == 0:
            raise InvalidParameter("truncate_prompt_tokens", 0, "-1 or at least 1")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            self.ignored.append("stream_options.include_obfuscation")


class GenerationBody(SamplingBody):
    """Fields that chat and text completions share."""

    foreign_fields = FOREIGN_FIELDS

    n: Whole = 1
    best_of: Whole | None = None
    """Number of answers to sample. OpenAI's API would return the best `n`; this server returns the first `n`."""
    max_tokens: Whole | None = None
    echo: bool = False
    """Whether to begin the response with the text that it continues. This is the prompt of a completion, or the last
    message of a chat if the assistant wrote it."""
    prompt_logprobs: Whole | None = None
    """Number of alternatives to report per prompt token; not with `stream`."""
    return_token_ids: bool = False
    """Whether to add the token ids of prompt and output to the response."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens by id, as `token_id:7`, since several tokens may have the same text."""
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    """vLLM's older name for `structured_outputs.json`."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, fail_fast=True)
    guided_grammar: str | None = None

    def sampling_params(self, defaults: dict[str, Any], *, closed: bool = True) -> SamplingParams:
        """Return the parameters for the engine. Raises InvalidParameter.

        defaults: values recommended by the model's authors, for fields that the request leaves open. closed: whether
        `disable_additional_properties` is the default.
        """
        given = {name: value for name in ENGINE_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{
                **defaults,
                **given,
                "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
                "logit_bias": self._token_biases(),
                "max_tokens": defaults.get("max_tokens") if self.token_limit() is None else self.token_limit(),
                "logprobs": self.num_logprobs(),
                "prompt_logprobs": self.num_prompt_logprobs(),
                "structured_outputs": self._structured_outputs(closed),
            }
        )

    def token_limit(self) -> int | None:
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Return how many alternatives to report per token; None for no log-probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return how many alternatives to report per prompt token; None for no log-probabilities."""
        return self.prompt_logprobs

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter("best_of", self.best_of, f"at least n ({self.n})")
        if self.best_of is not None and self.best_of > self.n:
            self.ignored.append("best_of")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is only allowed without stream", "prompt_logprobs")

    @property
    def tier_priority(self) -> int:
        """Priority of the request's service tier."""
        return TIER_PRIORITIES.get(self.service_tier, 0)

    def _token_biases(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise InvalidParameter("logit_bias", key, "an object whose keys are token ids")
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _structured_outputs(self, closed: bool) -> StructuredOutputsParams | None:
        """Return the requested structure, if any. Raises RequestError if several are given, or if one could never be
        enforced."""
        response_format, outputs = self.response_format, self.structured_outputs
        guided = {kind: value for kind in GUIDED if (value := getattr(self, f"guided_{kind}")) is not None}
        if guided:
            field = f"guided_{next(iter(guided))}"
            if outputs is not None or response_format is not None or len(guided) > 1:
                raise RequestError(f"{field} must be the only field that sets a form for the answer", field)
            return StructuredOutputsParams(**guided, field=field)
        if response_format is not None and response_format.type != "text":
            if outputs is not None:
                raise RequestError("response_format and structured_outputs cannot be combined", "structured_outputs")
            if response_format.type == "structural_tag":
                tag = response_format.model_dump(exclude={"type"}, exclude_none=True)
                return StructuredOutputsParams(
                    grammar=structural_tag_grammar(tag, "response_format", closed=closed), field="response_format"
                )
            schema = response_format.json_schema
            if (schema is not None) != (response_format.type == "json_schema"):
                raise RequestError(
                    'response_format.json_schema is required with the type "json_schema", and only allowed with it',
                    "response_format",
                )
            if schema is None:
                return StructuredOutputsParams(json_object=True, field="response_format")
            return StructuredOutputsParams(json=schema.content, field="response_format.json_schema.schema")
        if outputs is None or all(value in (None, False) for _, value in outputs):
            return None
        grammar = outputs.grammar
        if outputs.structural_tag is not None:
            field = "structured_outputs.structural_tag"
            if grammar is not None:
                raise RequestError("structured_outputs must have exactly one form", field)
            closed = closed if outputs.disable_additional_properties is None else outputs.disable_additional_properties
            grammar = structural_tag_grammar(outputs.structural_tag, field, closed=closed)
        return StructuredOutputsParams(
            json=outputs.schema_,
            regex=outputs.regex,
            choice=outputs.choice,
            grammar=grammar,
            json_object=bool(outputs.json_object),
            disable_additional_properties=outputs.disable_additional_properties,
        )


GUIDED = ("json", "regex", "choice", "grammar")
TIER_PRIORITIES = {"priority": -1, "flex": 1}
ENGINE_FIELDS = GenerationBody.model_fields.keys() & set(SamplingParams.__struct_fields__)
"""Fields that exist in SamplingParams under the same name."""
