"""`manta.SamplingParams`: the fields of vLLM's class, in its order. Engines get `engine.wire.sampling_params`."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import msgspec

from engine.errors import InvalidParameter, RequestError
from engine.offline.arguments import Argument, named
from engine.wire import sampling_params as wire
from engine.wire.structured_outputs import StructuredOutputsParams

HERE = "SamplingParams"
TABLE = tuple(
    Argument(name, HERE, note, ignored, neutral)
    for name, note, ignored, neutral in (
        ("best_of", "use n, and choose the best by cumulative_logprob", False, (None, 1)),
        ("early_stopping", "beam search is not supported; use n", False, (None, False)),
        ("extra_args", "they are arguments for plugins of vLLM", False, (None, {})),
        ("flat_logprobs", "log-probabilities are lists of dicts", False, (None, False)),
        ("guided_decoding", "use structured_outputs=StructuredOutputsParams(...)", False, (None,)),
        ("length_penalty", "beam search is not supported; use n", False, (None, 1)),
        ("logits_processors", "use logit_bias, allowed_token_ids, bad_words or structured_outputs", False, (None, [])),
        ("logprob_token_ids", "only the most likely tokens are reported: use logprobs", False, (None, [])),
        ("watermarking", "texts have no watermark", False, (None, False)),
        ("prompt_logprob_token_ids", "use prompt_logprobs, which reports the most likely tokens", False, (None, [])),
        ("prompt_logprob_start", "log-probabilities of the whole prompt are reported", False, (None, 0)),
        ("trace_decode_token_ids", "use prompts of token ids", False, (None, [])),
        ("output_kind", "a result is returned when it is complete", True, (None,)),
        ("output_text_buffer_length", "it is computed from stop", True, (None, 0)),
        ("repetition_detection", "use max_tokens or penalties", False, (None,)),
        ("routed_experts_prompt_start", "routed experts are not reported", False, (None, 0)),
        ("skip_clone", "parameters are never changed", True, (None, False)),
        ("spaces_between_special_tokens", "tokens are joined without extra spaces", True, (None, True)),
        ("stream_interval", "a result is returned when it is complete", True, (None,)),
        ("thinking_token_budget", "only `manta serve` limits reasoning: use max_tokens", False, (None,)),
        ("truncate_prompt_tokens", "use a prompt of token ids, and cut it", False, (None,)),
        ("use_beam_search", "beam search is not supported; use n", False, (None, False)),
    )
)


@dataclass
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names, order and defaults. Raises RequestError for an argument that
    is not supported or not known, by its name, and InvalidParameter for a value out of its range."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """Whether outputs have a text; without it, `stop` is refused."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    """Whether the whole prompt is computed, even if a part of it is cached."""

    def __post_init__(self) -> None:
        self.for_engine()

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def for_engine(self) -> wire.SamplingParams:
        """Return the parameters as engines take them. Raises InvalidParameter."""
        values = {name: getattr(self, name) for name in FIELDS if name in wire.SamplingParams.__struct_fields__}
        values = {name: value for name, value in values.items() if value is not None or name in MAY_BE_NONE}
        if isinstance(self.stop, str):
            values["stop"] = [self.stop]
        if values.get("stop") and not self.detokenize:
            raise InvalidParameter("stop", self.stop, "left out with detokenize=False")
        try:
            return msgspec.convert(values, wire.SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"{HERE}: {error}") from None


SamplingParams.__init__ = named(SamplingParams.__init__, HERE, TABLE)  # type: ignore[method-assign]
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
MAY_BE_NONE = ("max_tokens",)


def engine_params(params: SamplingParams | wire.SamplingParams) -> wire.SamplingParams:
    """Return parameters as engines take them. Raises InvalidParameter for a field that was set out of its range."""
    return params.for_engine() if isinstance(params, SamplingParams) else params
