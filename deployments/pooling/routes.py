"""The routes of embeddings, classes, scores and rankings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

from deployments.http.bodies import Bodies
from deployments.http.context import RequestContext
from deployments.http.json_body import json_response, with_warning
from deployments.http.route import KEY, Route
from deployments.http.streaming import run_while_connected
from deployments.openai.served.served_models import ServedModels
from deployments.pooling.pooled_model import PooledModel
from deployments.pooling.request_bodies import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    VectorBody,
)
from deployments.pooling.response_bodies import ClassList, EmbeddingList, Ranking, ScoreList, VectorList

B = TypeVar("B", bound=PoolingBody)
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class PoolingRoutes:
    def __init__(self, models: ServedModels, bodies: Bodies):
        self._models, self._bodies = models, bodies

    def routes(self) -> list[Route]:
        vectors, fit = "Texts to vectors.", "Score how well documents fit queries."
        classes, ranked = "Classes of texts.", "Rank documents by how well they fit a query."
        return [
            Route(KEY, "POST", "/v1/embeddings", self.embeddings, vectors, body=EmbeddingBody, result=EmbeddingList),
            Route(KEY, "POST", "/pooling", self.pooling, vectors, body=VectorBody, result=VectorList),
            Route(KEY, "POST", "/classify", self.classify, classes, body=ClassifyBody, result=ClassList),
            *(Route(KEY, "POST", path, self.score, fit, body=ScoreBody, result=ScoreList) for path in SCORE_PATHS),
            *(Route(KEY, "POST", path, self.rerank, ranked, body=RerankBody, result=Ranking) for path in RERANK_PATHS),
        ]

    async def embeddings(self, request: Request) -> Response:
        return await self._answer(request, EmbeddingBody, "embd-", PooledModel.embed)

    async def pooling(self, request: Request) -> Response:
        return await self._answer(request, VectorBody, "pool-", PooledModel.pool)

    async def classify(self, request: Request) -> Response:
        return await self._answer(request, ClassifyBody, "classify-", PooledModel.classify)

    async def score(self, request: Request) -> Response:
        return await self._answer(request, ScoreBody, "score-", PooledModel.score)

    async def rerank(self, request: Request) -> Response:
        return await self._answer(request, RerankBody, "rerank-", PooledModel.rerank)

    async def _answer(
        self,
        request: Request,
        kind: type[B],
        id_prefix: str,
        compute: Callable[[PooledModel, B, RequestContext], Coroutine[Any, Any, Any]],
    ) -> Response:
        body = await self._bodies.read(request, kind)
        model = PooledModel(await self._models.find(body.model, request))
        answer = await run_while_connected(request, compute(model, body, RequestContext.of(request, body, id_prefix)))
        return with_warning(body.ignored, json_response(answer))
