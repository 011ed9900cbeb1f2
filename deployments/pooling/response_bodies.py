"""Response bodies: OpenAI's field names for embeddings, vLLM's for vectors, scores and rankings."""

from __future__ import annotations

import msgspec

from deployments.frontend.sequence import RequestUsage
from deployments.openai.response_bodies import CostDetails, CostFields


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None
    cost: float | msgspec.UnsetType = msgspec.UNSET
    cost_details: CostDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, usage: RequestUsage, *, with_cost: bool) -> PoolingUsage:
        cost = CostFields.of(usage, asked=with_cost)
        return cls(usage.prompt_tokens, usage.prompt_tokens, cost=cost.cost, cost_details=cost.details)


class EmbeddingObject(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or their bytes in base64."""
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: PoolingUsage
    object: str = "list"


class VectorObject(msgspec.Struct):
    index: int
    data: list[float] | str
    """Numbers, or their bytes in base64."""
    object: str = "pooling"


class VectorList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[VectorObject]
    usage: PoolingUsage
    object: str = "list"


class ScoreObject(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreObject]
    usage: PoolingUsage
    object: str = "list"


class RankedText(msgspec.Struct):
    text: str
    multi_modal: None = None


class RankedDocument(msgspec.Struct):
    index: int
    """The document's position in the request, from 0."""
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[RankedDocument]
    """Results, best first."""
    usage: PoolingUsage
