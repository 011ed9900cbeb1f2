"""Checks requests for vectors, classes and scores, and what they may read from the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.door.part import Part
from engine.core.request import Request
from engine.pooling.requested_task import check_task
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams, SupportedTasks
from engine.wire.remote_request import RemoteRequest


class Pooling(Part):
    asks, answers = PoolingParams, True

    def __init__(self, supported: SupportedTasks, *, vocab_size: int | None = None, all_tokens: bool = False):
        """vocab_size: of a model that scores by the probabilities of two tokens; None for others. all_tokens: whether
        one vector is made of the hidden states of all prompt tokens."""
        self._supported, self._vocab_size, self.all_tokens = supported, vocab_size, all_tokens

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        if isinstance(asked, GenerateRequest):
            check_task(asked, self._supported, self._vocab_size)

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        if (params := asked.record(PoolingParams)) is not None:
            request.attach(params)
            request.prefix.skip_reading |= self.all_tokens or params.of_tokens
