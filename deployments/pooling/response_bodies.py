"""Response bodies: OpenAI's field names for embeddings, vLLM's for vectors, classes, scores and rankings."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from deployments.frontend.sequence import RequestUsage
from deployments.openai.response_bodies import CostDetails, CostFields

T = TypeVar("T")


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


class PooledList(msgspec.Struct, Generic[T]):
    """What a request with one or several texts gets, in their order."""

    id: str
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage
    object: str = "list"


class EmbeddingObject(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """Numbers, or their bytes in base64."""
    object: str = "embedding"


class EmbeddingList(PooledList[EmbeddingObject]):
    """The answer of /v1/embeddings."""


class VectorObject(msgspec.Struct):
    index: int
    data: list[float | list[float]] | str
    """Numbers of a text, or for a task of tokens those of each token; or all their bytes in base64."""
    object: str = "pooling"


class VectorList(PooledList[VectorObject]):
    """The answer of /pooling."""


class ClassObject(msgspec.Struct):
    index: int
    label: str
    """Name of the most probable class."""
    probs: list[float]
    """One number for each class."""
    num_classes: int


class ClassList(PooledList[ClassObject]):
    """The answer of /classify."""


class ScoreObject(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(PooledList[ScoreObject]):
    """The answer of /score."""


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
