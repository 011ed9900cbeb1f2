"""Response bodies: OpenAI's field names for embeddings, vLLM's for scores and rankings."""

from __future__ import annotations

import msgspec


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int) -> PoolingUsage:
        return cls(prompt_tokens, prompt_tokens)


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
