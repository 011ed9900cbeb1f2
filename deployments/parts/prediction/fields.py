"""The field by which a client predicts an output."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deployments.http.bodies import PartFields
from deployments.http.body import StrictModel
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import MAX_PARTS, TextPart
from engine.errors import InvalidParameter


class Prediction(StrictModel):
    """The output that the client expects. It makes the answer faster, not different."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class PredictionFields(PartFields):
    kinds = (ChatBody,)

    prediction: Prediction | None = None

    def check(self) -> None:
        """Refuse the fields that OpenAI refuses together with a prediction, so that a request means the same in both
        APIs."""
        super().check()
        if self.prediction is None:
            return
        for field, limit, fits in (
            ("n", "1", lambda n: n == 1),
            ("logprobs", "left out", lambda logprobs: not logprobs),
            ("presence_penalty", "at most 0", lambda penalty: penalty <= 0),
            ("frequency_penalty", "at most 0", lambda penalty: penalty <= 0),
            ("max_completion_tokens", "left out, for max_tokens", lambda tokens: tokens is None),
            ("tools", "left out", lambda tools: not tools),
        ):
            if not fits(value := getattr(self, field)):
                raise InvalidParameter(field, value, f"{limit} with a prediction")
