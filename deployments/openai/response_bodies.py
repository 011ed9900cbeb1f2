"""Response bodies with OpenAI's field names. They are msgspec structs, because a stream makes one per token.

Bodies have all keys that vLLM's have, because clients written for it read them without asking whether they are there
(`if message.reasoning:`). What Manta does not know is null.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from deployments.billing.prices import FREE
from deployments.frontend.sequence import RequestUsage

FinishReason = Literal["stop", "length", "tool_calls"]


class HoldBody(msgspec.Struct, omit_defaults=True):
    """Outcome of a hold of a part of the prompt, which the client wanted to stay cached."""

    status: Literal["held", "refused"]
    tokens: int
    ttl_s: float
    code: str | None = None
    """Why it was refused."""
    reason: str | None = None

    @classmethod
    def all_of(cls, usage: RequestUsage) -> list[HoldBody] | msgspec.UnsetType:
        """Return the holds of a request; UNSET if it asks for none."""
        return [
            cls("refused" if each.refusal else "held", each.tokens, each.ttl_s, each.refusal, each.reason or None)
            for each in usage.hold_outcomes
        ] or msgspec.UNSET


class NumericsBorder(msgspec.Struct):
    """Where a choice has gone on in an engine of another version, which computes with other numerics."""

    index: int
    """Of the choice, counted over all prompts."""
    tokens: int
    """Completion tokens before."""

    @classmethod
    def all_of(cls, usage: RequestUsage) -> list[NumericsBorder] | msgspec.UnsetType:
        """Return the borders in the answers to a request; UNSET if there are none."""
        return [cls(*border) for border in usage.numerics_borders] or msgspec.UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """Computed tokens that are held; UNSET unless the request asks for holds."""
    created_cache_tokens: None = None
    multimodal_tokens: None = None


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """UNSET unless the model is known to reason."""
    accepted_prediction_tokens: int = 0
    """Tokens of the request's `prediction` that were drafted and accepted into the answer."""
    rejected_prediction_tokens: int = 0
    """Tokens that were drafted but rejected. They do not count in `completion_tokens`."""


class CostDetails(msgspec.Struct):
    compute_seconds: float
    """Share of the time of the engines' steps."""
    kv_gib_seconds: float
    """GiB of KV cache times the seconds for which the request used them."""
    wasted_seconds: float
    """Share for tokens that had to be computed again; not in `compute_seconds`."""
    tier_gib_seconds: float | msgspec.UnsetType = msgspec.UNSET
    """GiB in tiers below the KV cache times the seconds for which the holds kept them that the request has used; UNSET
    if there are none."""


class CostFields(NamedTuple):
    """Fields of a usage. They are UNSET unless the request asks for them."""

    cost: float | msgspec.UnsetType = msgspec.UNSET
    """Money by the model's prices; UNSET too if it has none."""
    details: CostDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, usage: RequestUsage, *, asked: bool) -> CostFields:
        if not asked:
            return cls()
        cost, prices = usage.cost, usage.prices
        money = msgspec.UNSET if prices == FREE else prices.of(cost)
        below = cost.tier_gib_s or msgspec.UNSET
        return cls(money, CostDetails(cost.compute_s, cost.kv_gib_s, cost.wasted_s, below))


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    holds: list[HoldBody] | msgspec.UnsetType = msgspec.UNSET
    cost: float | msgspec.UnsetType = msgspec.UNSET
    cost_details: CostDetails | msgspec.UnsetType = msgspec.UNSET
    numerics_borders: list[NumericsBorder] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, usage: RequestUsage, reasoning_tokens: int | None = None, *, with_cost: bool = False) -> UsageBody:
        """Return the usage of a response. reasoning_tokens: None unless the model is known to reason."""
        details: CompletionTokensDetails | None = None
        if reasoning_tokens is not None or usage.has_prediction:
            reasoned = msgspec.UNSET if reasoning_tokens is None else reasoning_tokens
            details = CompletionTokensDetails(
                reasoned, usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
            )
        cost = CostFields.of(usage, asked=with_cost)
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                usage.cached_tokens, usage.held_tokens() if usage.holds else msgspec.UNSET
            ),
            completion_tokens_details=details,
            holds=HoldBody.all_of(usage),
            cost=cost.cost,
            cost_details=cost.details,
            numerics_borders=NumericsBorder.all_of(usage),
        )


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Alternatives by token id for each prompt token; None for the first."""


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str
    """The text of a JSON object."""


class ToolCallBody(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    content: str | None = None
    """None in a response of only reasoning or tool calls."""
    role: str = "assistant"
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class CalledFunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A part of a tool call. The first part has the id, type and name; the arguments of all parts are concatenated."""

    index: int
    function: CalledFunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct):
    """A chunk of a stream. The last chunk of each choice has the fingerprint and the service tier."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str
    usage: UsageBody | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: str | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    """In the first chunk of a choice; None unless requested."""
    prompt_text: msgspec.UnsetType | None = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One completion, or the part of it in a chunk. What the client did not ask for is None."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None


class CompletionChunk(msgspec.Struct):
    """A chunk of a stream. The last chunk of each choice has the fingerprint and the service tier."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str
    usage: UsageBody | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: str | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    object: str = "text_completion"
    system_fingerprint: str | None = None
    service_tier: str | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    input_modalities: list[str]
    object: Literal["model"] = "model"
    owned_by: str = "manta"
    parent: str | None = None
    permission: list[None] = []


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokens(msgspec.Struct):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    """The response of /detokenize."""

    prompt: str
