"""Outputs that clients predict, of which engines make drafts."""

from __future__ import annotations

from deployments.openai.served.model_part import Draft, ModelPart
from deployments.parts.prediction.fields import PredictionFields
from engine.text.tokenizer import Tokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import Prediction


class Predictions(ModelPart):
    """The field `prediction` of chats."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, *, drafts: bool):
        """drafts: whether the engines use speculative decoding."""
        self._tokenizer, self._max_model_len, self._drafts = tokenizer, max_model_len, drafts

    def requests(self, draft: Draft, requests: list[list[GenerateRequest]]) -> list[list[GenerateRequest]]:
        body = draft.body
        if not isinstance(body, PredictionFields) or body.prediction is None:
            return requests
        if not self._drafts:
            draft.ignored.append("prediction")
        text = body.prediction.text
        self._tokenizer.check_length(text, self._max_model_len, field="prediction")
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        prediction = Prediction(tokens) if tokens else None
        return [[request.asking(prediction) for request in sequences] for sequences in requests]
