"""Checks that a model supports what a request asks for."""

from __future__ import annotations

from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams, SupportedTasks


def check_task(message: GenerateRequest, supported: SupportedTasks, vocab_size: int | None) -> None:
    """Raise RequestError unless a model supports the kind of request. vocab_size: of a model that scores by the
    probabilities of two tokens; None for others."""
    pooling = message.record(PoolingParams)
    task = "generate" if pooling is None else pooling.asked
    supported.check(task, None if pooling is None else pooling.dimensions)
    if pooling is not None and task == "score" and vocab_size is not None:
        ids = pooling.score_token_ids
        if not ids or not all(0 <= token < vocab_size for token in ids):
            raise InvalidParameter("score_token_ids", ids, f"two token ids below {vocab_size}")
